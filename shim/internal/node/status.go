package node

import (
	"context"
	"slices"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Status returns the alloc named by only, or all allocs if only is empty, with the state of their volumes. at is the
// index of the answer.
func (a *Allocs) Status(
	ctx context.Context, only registry.AllocID,
) (list []registry.AllocStatus, at registry.Seq, err error) {
	err = a.State.View(ctx, func(v registry.View) error {
		at = v.Index()
		if only != "" {
			if al, known := v.Alloc(only); known {
				list = append(list, allocStatus(v, al, v.ClaimsOf(al.ID)))
			}
			return nil
		}
		claims := map[registry.AllocID][]registry.Claim{} // ClaimsOf would read the keys of all claims for each alloc
		for _, c := range v.AllClaims() {
			claims[c.Alloc] = append(claims[c.Alloc], c)
		}
		for _, al := range v.Allocs() {
			list = append(list, allocStatus(v, al, claims[al.ID]))
		}
		return nil
	})
	return list, at, err
}

// allocStatus returns the status of an alloc and of the volumes that it claims.
func allocStatus(v registry.View, al registry.Alloc, claims []registry.Claim) registry.AllocStatus {
	out := registry.AllocStatus{Alloc: al}
	for _, c := range claims {
		r, _ := v.Ref(c.ClaimKey())
		use := registry.AllocVolume{
			Request: c.Request, Name: c.Name, Volume: c.Volume, Usage: c.Usage, Publish: r.Publish, Target: r.Target,
			Trouble: r.Trouble, Troubled: r.Troubled, Wait: waitOf(v, al, c),
		}
		if vol, ok := v.VolumeByKey(c.Volume); ok {
			use.Health = vol.Health
			p, _ := v.Staging(c.Volume)
			if e := vol.Expansion.OnNode(p.Expanded, len(v.Refs(c.Volume)) > 0); e.Pending() || e.Open() {
				use.Expansion = e
			}
		}
		at, _ := v.Attachment(registry.AttachmentKey{Volume: c.Volume, Node: c.Node})
		use.Attach = at.State
		if p, ok := v.Staging(c.Volume); ok {
			use.Stage, use.Health.Node = p.State, p.Condition
		}
		if in, ok := registry.OpenIntent(v, c.Volume); ok {
			use.Intent = &in
		}
		if use.Wait != nil {
			out.Waiting = slices.DeleteFunc(slices.Clone(out.Waiting), func(w registry.Wait) bool {
				return w.Request == use.Request
			})
			out.Waiting = append(out.Waiting, *use.Wait)
		}
		out.Volumes = append(out.Volumes, use)
	}
	return out
}

// waitOf returns the current wait of a claim's request: the wait of its open call, or else the recorded one; nil: none.
// A request that waits for a plugin or a lock has no open call. An open call of the volume then belongs to another
// request.
func waitOf(v registry.View, al registry.Alloc, c registry.Claim) *registry.Wait {
	if al.State == registry.AllocReady {
		return nil
	}
	var recorded *registry.Wait
	for _, w := range al.Waiting {
		if w.Request == c.Request {
			recorded = &w
		}
	}
	open, found := registry.OpenIntent(v, c.Volume)
	ofOther := open.Alloc != "" && (open.Alloc != al.ID || open.Request != c.Request)
	waitsForTurn := recorded != nil && (recorded.Step == registry.StepPlugin || recorded.Step == registry.StepTurn)
	if !found || open.RPC.Step() == "" || ofOther || waitsForTurn {
		return recorded
	}
	w := intent.Waits(open)
	w.Alloc, w.Request = al.ID, c.Request
	if recorded == nil {
		return &w
	}
	if open.Outcome != registry.OutcomePending && w.Next.IsZero() {
		w.Next = recorded.Next
	}
	w = continueWait(*recorded, w)
	return &w
}

// Volumes returns the volume named by only, or all volumes if only is zero, with their use. at is the index of the
// answer.
func (a *Allocs) Volumes(
	ctx context.Context, only registry.VolumeName,
) (list []registry.VolumeStatus, at registry.Seq, err error) {
	err = a.State.View(ctx, func(v registry.View) error {
		at = v.Index()
		var volumes []registry.Volume
		var allocs []registry.Alloc
		if only == (registry.VolumeName{}) {
			volumes, allocs = v.Volumes(), v.Allocs()
		} else {
			volumes, allocs = volumeAndAllocs(v, only)
		}
		waits, creations := waitsOf(v, allocs), creationsOf(v)
		for _, vol := range volumes {
			st := volumeStatus(v, vol, waits[vol.VolumeName()])
			if st.Intent == nil {
				st.Intent = creations[vol.VolumeName()]
			}
			if st.Intent != nil && st.Intent.RPC.Step() == "" {
				st.Waiting = append(st.Waiting, intent.Waits(*st.Intent))
			}
			list = append(list, st)
		}
		return nil
	})
	return list, at, err
}

// volumeAndAllocs returns the volume with the given name, if it exists, and the allocs that claim it or wait for it.
func volumeAndAllocs(v registry.View, name registry.VolumeName) ([]registry.Volume, []registry.Alloc) {
	vol, known := v.Volume(name)
	if !known {
		return nil, nil
	}
	allocs := v.AllocsWhere(func(al registry.Alloc) bool {
		return slices.ContainsFunc(al.Waiting, func(w registry.Wait) bool { return w.Volume == name })
	})
	for _, c := range v.Claims(vol.VolumeKey()) {
		al, known := v.Alloc(c.Alloc)
		if known && !slices.ContainsFunc(allocs, func(o registry.Alloc) bool { return o.ID == al.ID }) {
			allocs = append(allocs, al)
		}
	}
	return []registry.Volume{vol}, allocs
}

// waitsOf groups the waits of the allocs by volume.
func waitsOf(v registry.View, allocs []registry.Alloc) map[registry.VolumeName][]registry.Wait {
	waits := map[registry.VolumeName][]registry.Wait{}
	for _, al := range allocs {
		if al.State == registry.AllocReady {
			continue
		}
		for _, w := range allocStatus(v, al, v.ClaimsOf(al.ID)).Waiting {
			waits[w.Volume] = append(waits[w.Volume], w)
		}
	}
	return waits
}

// creationsOf returns the open CreateVolume calls by volume name. A volume has no key before its creation ends.
func creationsOf(v registry.View) map[registry.VolumeName]*registry.Intent {
	open := map[registry.VolumeName]*registry.Intent{}
	for _, in := range v.Intents() {
		if in.RPC == registry.CreateVolumeRPC {
			open[in.Name] = &in
		}
	}
	return open
}

// volumeStatus returns the status of a volume with the waits for it.
func volumeStatus(v registry.View, vol registry.Volume, waits []registry.Wait) registry.VolumeStatus {
	out := registry.VolumeStatus{Volume: vol, Waiting: waits}
	out.Attachments = v.Attachments(vol.VolumeKey())
	out.Staging, _ = v.Staging(vol.VolumeKey())
	out.Health.Node = out.Staging.Condition
	out.Expansion = vol.Expansion.OnNode(out.Staging.Expanded, len(v.Refs(vol.VolumeKey())) > 0)
	if in, ok := registry.OpenIntent(v, vol.VolumeKey()); ok {
		out.Intent = &in
	}
	for _, c := range v.Claims(vol.VolumeKey()) {
		r, _ := v.Ref(c.ClaimKey())
		out.Holders = append(out.Holders, registry.Holder{Claim: c, Publish: r.Publish, Target: r.Target,
			Trouble: r.Trouble, Troubled: r.Troubled})
	}
	return out
}

// Claims lists every claim.
func (a *Allocs) Claims(ctx context.Context) (list []registry.Claim, at registry.Seq, err error) {
	err = a.State.View(ctx, func(v registry.View) error {
		at, list = v.Index(), v.AllClaims()
		return nil
	})
	return list, at, err
}
