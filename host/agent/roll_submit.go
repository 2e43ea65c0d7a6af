package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/registry"
)

// rollOrReplace returns the record to store for a job that is submitted as r and has the record was. If r changes
// groups whose plugin allocs run, the result is a copy of was with r as its next version, else r.
func (a *Agent) rollOrReplace(was, r *JobRecord) *JobRecord {
	if was == nil || was.Stopped {
		return r
	}
	if next := was.Next; next != nil && !maps.Equal(r.wanted(), was.wanted()) {
		same := *r
		same.Rolled = next.Rolled
		if maps.Equal(same.wanted(), next.wanted()) { // r is the next version again
			same.Version, same.Submitted = next.Version, next.Submitted
			out := *was
			out.Next = &same
			return &out
		}
	}
	next := a.rollTo(was, r, false)
	rolling := next.rollSlots()
	for _, rec := range a.Allocs() {
		if rec.Job == was.Job.ID && !rec.State.Ended() && !rec.Stop && rolling[rec.slot()] != "" {
			return next
		}
	}
	if was.rollOpen() { // the old allocs of the roll may still be needed
		roll := *was.Roll
		if was.Next != nil {
			roll.Failed = fmt.Sprintf("version %d was submitted before the new allocs were healthy", r.Version)
		}
		r.Roll = &roll
	}
	return r
}

// rollTo returns a copy of was with r as its next version. A running alloc of an earlier roll may have the digest that
// r wants. It still counts as an old alloc, so rollTo gives the group in r a new digest.
func (a *Agent) rollTo(was, r *JobRecord, drain bool) *JobRecord {
	next := *was
	next.Next, next.Roll = r, &Roll{Version: r.Version, Began: r.Submitted, Drain: drain}
	for {
		rolling := next.rollSlots()
		all := a.Allocs()
		i := slices.IndexFunc(all, func(rec *AllocRecord) bool {
			return rec.Job == was.Job.ID && !rec.State.Ended() && rolling[rec.slot()] == rec.Digest
		})
		if i < 0 {
			return &next
		}
		r.rollGroup(all[i].Group.Name)
	}
}

// rollGroup gives the allocs of a group a new digest.
func (j *JobRecord) rollGroup(group string) {
	rolled := map[string]uint64{}
	maps.Copy(rolled, j.Rolled)
	rolled[group]++
	j.Rolled = rolled
}

// RollOptions are the options of RollPlugin.
type RollOptions struct {
	Drain bool // restart the allocs that use mounts of old plugin processes
	Force bool // even if a plugin that cannot run twice serves mounts, or something still needs an old instance
}

// RollPlugin replaces the running allocs of the plugin with new ones of the same jobs. It returns the IDs of these jobs
// once the rolls are recorded. Either all of these jobs take their next version, or none does.
//
// If a job of the plugin is being rolled already, RollPlugin starts no roll. It adds the options to the running rolls:
// Drain to all, Force to those whose new instances serve. If there is nothing to add, it returns ErrConflict.
func (a *Agent) RollPlugin(ctx context.Context, id host.PluginID, s Lister, o RollOptions) ([]string, error) {
	jobs := a.jobsOf(id)
	if len(jobs) == 0 {
		return nil, registry.Errorf(registry.ErrNotFound,
			"no running job has a csi_plugin block with id = %q (see holdfast plugin status)", id)
	}
	joins := slices.ContainsFunc(jobs, (*JobRecord).rollOpen)
	if !o.Force && !joins {
		for _, j := range jobs {
			if err := a.checkStopFirst(ctx, a.withNextRoll(j, id), s); err != nil {
				return nil, err
			}
		}
	}
	a.writing.Lock()
	defer a.writing.Unlock()
	if err := a.acceptsWork(); err != nil {
		return nil, err
	}
	changed, err := a.joinRolls(id, o)
	switch {
	case err != nil:
		return nil, err
	case len(changed) == 0 && joins:
		return nil, registry.Errorf(registry.ErrConflict, "the roll of plugin %q has just ended; to begin another, "+
			"run the command again", id)
	case len(changed) == 0:
		changed = a.beginRolls(id, o)
	}
	var ids []string
	for _, j := range changed {
		ids = append(ids, j.Job.ID)
	}
	return ids, a.commitJobs(changed...)
}

// joinRolls returns the jobs of the plugin that are being rolled, with the options added to their rolls.
func (a *Agent) joinRolls(id host.PluginID, o RollOptions) (changed []*JobRecord, err error) {
	for _, j := range a.jobsOf(id) {
		if !j.rollOpen() {
			continue
		}
		if !o.Drain && (!o.Force || j.Next != nil) {
			return nil, registry.Errorf(registry.ErrConflict, "job %s is being rolled already: %s (see %s)", j.Job.ID,
				a.DescribeRoll(j), "holdfast plugin status "+string(id))
		}
		next, roll := *j, *j.Roll
		roll.Drain, roll.Force = roll.Drain || o.Drain, roll.Force || o.Force && j.Next == nil
		next.Roll = &roll
		changed = append(changed, &next)
	}
	return changed, nil
}

// beginRolls returns the jobs of the plugin with new rolls. The jobs are rolled together.
func (a *Agent) beginRolls(id host.PluginID, o RollOptions) (begun []*JobRecord) {
	var together []string
	for _, j := range a.jobsOf(id) {
		begun = append(begun, a.rollTo(j, a.withNextRoll(j, id).Next, o.Drain))
		together = append(together, j.Job.ID)
	}
	if len(begun) > 1 {
		for _, j := range begun {
			j.Roll.Jobs = together
		}
	}
	return begun
}

// jobsOf returns the jobs that run the plugin and are not stopped, sorted by job ID.
func (a *Agent) jobsOf(id host.PluginID) (jobs []*JobRecord) {
	for _, j := range a.Jobs() {
		if !j.Stopped && slices.ContainsFunc(j.Job.Groups, func(g hooks.Group) bool {
			return slices.Contains(pluginsOf(g), id)
		}) {
			jobs = append(jobs, j)
		}
	}
	return jobs
}

// withNextRoll returns the job with a next version that differs only in the digests of the plugin's groups, so that
// they get new allocs.
func (a *Agent) withNextRoll(j *JobRecord, id host.PluginID) *JobRecord {
	next := *j
	next.Next, next.Roll = nil, nil
	next.Version, next.Submitted = a.lastVersion(j, j.Job.ID)+1, time.Now().UTC()
	for _, g := range j.Job.Groups {
		if slices.Contains(pluginsOf(g), id) {
			next.rollGroup(g.Name)
		}
	}
	out := *j
	out.Next = &next
	return &out
}

// checkStopFirst returns an error if the roll to the job's next version would stop a plugin process that serves mounts
// before its replacement runs.
func (a *Agent) checkStopFirst(ctx context.Context, job *JobRecord, s Lister) error {
	rolling, groups := job.rollSlots(), pluginGroups(job.Next)
	for _, r := range a.Allocs() {
		if r.Job != job.Job.ID || r.State.Ended() || rolling[r.slot()] == "" || !stopsFirst(groups[r.Group.Name]) {
			continue
		}
		tasks, err := listPluginTasks(ctx, s, r.Plugins())
		if err != nil {
			return err
		}
		for _, t := range r.Group.Tasks {
			if served := tasks[r.taskKey(t.Name)].Volumes; len(served) > 0 {
				return registry.Errorf(registry.ErrConflict, "a process of plugin %q serves %s, and it is stopped "+
					"before the new instance starts (roll = %q); stop these users first, or use --force",
					t.Plugin, a.describeServed(served), hooks.RollStopFirst)
			}
		}
	}
	return nil
}

// describeServed names volumes and the allocs that use them.
func (a *Agent) describeServed(served []registry.ServedVolume) string {
	var texts []string
	for _, v := range served {
		var users []string
		for _, id := range v.Allocs {
			users = append(users, a.describeAlloc(id))
		}
		text := fmt.Sprintf("the mounts of volume %s", v)
		if len(users) > 0 {
			text += " used by " + strings.Join(users, " and ")
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

// pluginTasks are tasks of plugins, with what is needed of each: its calls, and the volumes that its process serves.
type pluginTasks map[host.TaskKey]host.PluginTask

// listPluginTasks asks the shim for the tasks of plugins.
func listPluginTasks(ctx context.Context, s Lister, ids []host.PluginID) (pluginTasks, error) {
	out := pluginTasks{}
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		list, _, err := s.Plugins(ctx, host.PluginQuery{Plugin: id})
		if err != nil {
			return nil, fmt.Errorf("list the tasks of plugin %q: %w", id, err)
		}
		for _, t := range list.Tasks {
			out[t.TaskKey] = t
		}
	}
	return out, nil
}
