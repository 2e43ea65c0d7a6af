package alloc

import (
	"context"

	"holdfast/config"
	"holdfast/registry"
)

// Status lists allocs and how far their volumes have come; only says which, the zero value all. It is true for the index returned.
func (a *Allocs) Status(ctx context.Context, only registry.AllocID) (list []registry.AllocStatus, at registry.Seq, err error) {
	err = a.log.View(ctx, func(v registry.View) error {
		at = v.Index()
		for _, al := range v.Allocs() {
			if only == "" || al.ID == only {
				list = append(list, allocStatus(v, al))
			}
		}
		return nil
	})
	return list, at, err
}

func allocStatus(v registry.View, al registry.Alloc) registry.AllocStatus {
	out := registry.AllocStatus{Alloc: al}
	for _, c := range v.ClaimsOf(al.ID) {
		use := registry.Use{Request: c.Request, Name: c.Name, Volume: c.Volume, Usage: c.Usage}
		if p, ok := v.Placement(c.Volume); ok {
			use.Attach, use.Stage = p.Attach, p.Stage
		}
		if in, ok := v.Intent(c.Volume); ok {
			use.Intent = &in
		}
		for _, r := range v.RefsOf(al.ID) {
			if r.ClaimKey() == c.ClaimKey() {
				use.Publish, use.Target = r.Publish, r.Target
			}
		}
		out.Uses = append(out.Uses, use)
	}
	return out
}

// Volumes lists volumes and how they are used now. It is true for the index returned.
func (a *Allocs) Volumes(ctx context.Context) (list []registry.VolumeStatus, at registry.Seq, err error) {
	err = a.log.View(ctx, func(v registry.View) error {
		at = v.Index()
		for _, vol := range v.Volumes() {
			list = append(list, volumeStatus(v, vol))
		}
		return nil
	})
	return list, at, err
}

func volumeStatus(v registry.View, vol registry.Volume) registry.VolumeStatus {
	out := registry.VolumeStatus{Volume: vol}
	out.Placement, _ = v.Placement(vol.VolumeKey())
	if in, ok := v.Intent(vol.VolumeKey()); ok {
		out.Intent = &in
	}
	refs := map[registry.ClaimKey]registry.Ref{}
	for _, r := range v.Refs(vol.VolumeKey()) {
		refs[r.ClaimKey()] = r
	}
	for _, c := range v.Claims(vol.VolumeKey()) {
		r := refs[c.ClaimKey()]
		out.Holders = append(out.Holders, registry.Holder{Claim: c, Publish: r.Publish, Target: r.Target})
	}
	return out
}

// Claims lists every claim.
func (a *Allocs) Claims(ctx context.Context) (list []registry.Claim, at registry.Seq, err error) {
	err = a.log.View(ctx, func(v registry.View) error {
		at, list = v.Index(), v.AllClaims()
		return nil
	})
	return list, at, err
}

// Plugins lists the tasks that run a plugin: what is expected.
func (t *Tasks) Plugins(ctx context.Context) (list []registry.PluginTask, at registry.Seq, err error) {
	err = t.log.View(ctx, func(v registry.View) error {
		at = v.Index()
		for _, task := range v.Tasks() {
			spec, err := config.OpenTask(task.Sealed)
			if err != nil {
				continue // said when it was to be watched
			}
			list = append(list, registry.PluginTask{
				TaskKey: task.TaskKey, Plugin: spec.Plugin.ID, Type: string(spec.Plugin.Type), Job: task.Job, Phase: task.Phase,
				Attempt: task.Attempt, Restart: task.Restart,
			})
		}
		return nil
	})
	return list, at, err
}

// Restarts lists the restart requests that stand.
func (t *Tasks) Restarts(ctx context.Context) (list []registry.PendingRestart, at registry.Seq, err error) {
	err = t.log.View(ctx, func(v registry.View) error {
		at = v.Index()
		for _, task := range v.Tasks() {
			if task.Restart != nil && task.Restart.Attempt == task.Attempt {
				list = append(list, registry.PendingRestart{TaskKey: task.TaskKey, RestartRequest: *task.Restart})
			}
		}
		return nil
	})
	return list, at, err
}
