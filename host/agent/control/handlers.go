package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

func parseOptions(src Submission) host.ParseOptions {
	return host.ParseOptions{Variables: src.Variables, VariableFiles: src.Files, Dir: src.Dir}
}

func source(src Submission) host.Source { return host.Source{Name: src.Name, Text: src.Text} }

func (s *Server) postJob(r *http.Request, src Submission) (any, error) {
	job, _, err := s.host.Parse(r.Context(), source(src), parseOptions(src))
	if err != nil {
		return nil, err
	}
	rec, err := s.agent.Submit(r.Context(), job, src, s.host,
		agent.SubmitOptions{Force: isTrue(r, "force"), Rerun: isTrue(r, "rerun")})
	if err != nil {
		return nil, err
	}
	return s.jobView(rec, s.agent.Allocs()), nil
}

func (s *Server) postPlan(r *http.Request, src Submission) (any, error) {
	job, _, err := s.host.Parse(r.Context(), source(src), parseOptions(src))
	if err != nil {
		return nil, err
	}
	return s.agent.Plan(r.Context(), job, s.host)
}

func (s *Server) getJobs(*http.Request) (any, error) {
	out, all := []Job{}, s.agent.Allocs()
	for _, j := range s.agent.Jobs() {
		v := s.jobView(j, all)
		v.Allocs = nil
		out = append(out, v)
	}
	return out, nil
}

func (s *Server) getJob(r *http.Request) (any, error) {
	v, err := s.job(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	s.setWaits(r.Context(), v.Allocs)
	return v, nil
}

// job returns a job with its allocs as the agent has recorded them.
func (s *Server) job(id string) (Job, error) {
	rec, err := s.agent.Job(id)
	if err != nil {
		return Job{}, err
	}
	return s.jobView(rec, s.agent.Allocs()), nil
}

func (s *Server) deleteJob(r *http.Request) (any, error) {
	id := r.PathValue("id")
	err := s.agent.StopJob(r.Context(), id, s.host,
		agent.StopOptions{Purge: isTrue(r, "purge"), Force: isTrue(r, "force")})
	return struct{}{}, err
}

func (s *Server) getAllocs(r *http.Request) (any, error) {
	out := []Alloc{}
	for _, rec := range s.agent.Allocs() {
		out = append(out, allocView(rec))
	}
	s.setWaits(r.Context(), out)
	return out, nil
}

// setWaits sets what the allocs wait for. Without an answer from the shim the agent's records stay.
func (s *Server) setWaits(ctx context.Context, allocs []Alloc) {
	if !slices.ContainsFunc(allocs, func(a Alloc) bool {
		return a.State == agent.AllocPending || a.State == agent.AllocReleasing
	}) {
		return
	}
	list, _, err := s.host.Allocs(ctx, "")
	if err != nil {
		return
	}
	waiting := map[string][]registry.Wait{}
	for _, st := range list {
		waiting[string(st.ID)] = st.Waiting
	}
	for i := range allocs {
		allocs[i].setWaits(s.agent.DescribeWaits(ctx, s.host, waiting[allocs[i].ID]))
	}
}

// setWaits sets what the alloc waits for. The shim's answer is newer than the agent's record.
func (a *Alloc) setWaits(text string) {
	if text != "" && a.Ended.IsZero() {
		a.Reason = text
	}
}

// getAlloc returns an alloc with its volumes. Without an answer from the shim the volumes are left out.
func (s *Server) getAlloc(r *http.Request) (any, error) {
	rec, err := s.agent.Find(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	out := allocView(rec)
	s.setProblems(r.Context(), out)
	if !rec.UsesVolumes() || rec.State.Ended() {
		return out, nil
	}
	list, _, err := s.host.Allocs(r.Context(), rec.ID)
	if err != nil {
		out.Reason = "no answer from the shim: " + err.Error()
		return out, nil
	}
	e := s.explainer()
	for _, st := range list {
		out.setWaits(s.agent.DescribeWaits(r.Context(), s.host, st.Waiting))
		out.Waiting, out.Notices = st.Waiting, e.waits(r.Context(), st.Waiting)
		for _, u := range st.Volumes {
			use, notices := e.useView(rec.ID, u)
			out.Volumes, out.Notices = append(out.Volumes, use), append(out.Notices, notices...)
		}
	}
	return out, nil
}

func (s *Server) volumes(ctx context.Context, q host.VolumeQuery) ([]Volume, error) {
	list, _, err := s.host.Volumes(ctx, q)
	if err != nil {
		return nil, err
	}
	out, e := []Volume{}, s.explainer()
	for _, v := range list {
		out = append(out, e.volumeView(v))
	}
	return out, nil
}

// getVolumes lists the volumes with a record or, with ?at=PLUGIN, those that the plugin has.
func (s *Server) getVolumes(r *http.Request) (any, error) {
	if id := host.PluginID(r.URL.Query().Get("at")); id != "" {
		list, err := askPlugin(s, r, id, func(ctx context.Context) ([]host.PluginVolume, error) {
			return s.host.VolumesAtPlugin(ctx, id)
		})
		return append([]host.PluginVolume{}, list...), err
	}
	return s.volumes(r.Context(), host.VolumeQuery{Plugin: host.PluginID(r.URL.Query().Get("plugin"))})
}

func (s *Server) getVolume(r *http.Request) (any, error) {
	name := volumeName(r)
	list, _, err := s.host.Volumes(r.Context(), host.VolumeQuery{Name: name})
	if err != nil {
		return nil, err
	}
	for _, v := range list {
		if v.VolumeName() == name {
			e := s.explainer()
			out := e.volumeView(v)
			for i, h := range out.Holders {
				if len(h.Engines) > 0 {
					out.Holders[i].Containers, _ = s.agent.EngineContainers(v.ID) // the rest of the answer is of use too
				}
			}
			out.Notices = append(e.waits(r.Context(), v.Waiting), out.Notices...)
			return out, nil
		}
	}
	return nil, registry.Errorf(registry.ErrNotFound, "volume %s not found; run holdfast volume list for a list", name)
}

func volumeName(r *http.Request) host.VolumeName {
	n := host.VolumeName{Namespace: registry.Namespace(r.URL.Query().Get("namespace")),
		ID: registry.VolumeID(r.PathValue("id"))}
	if n.Namespace == "" {
		n.Namespace = registry.DefaultNamespace
	}
	return n
}

// register refuses a volume without an external ID.
func (s *Server) register(ctx context.Context, spec host.VolumeSpec) (host.VolumeStatus, error) {
	if spec.External == "" {
		return host.VolumeStatus{}, registry.Invalid(
			"volume %s has no external_id; add the ID that the plugin uses, or create the volume with holdfast volume create",
			spec.VolumeName())
	}
	return s.host.RegisterVolume(ctx, spec)
}

// postVolume creates, registers or adopts a volume.
func (s *Server) postVolume(do func(context.Context, host.VolumeSpec) (host.VolumeStatus, error)) handler {
	return withBody(func(r *http.Request, src VolumeSubmission) (any, error) {
		spec, warnings, err := s.volumeSpec(r.Context(), src)
		if err != nil {
			return nil, err
		}
		nameVolume(r.Context(), spec.VolumeName())
		st, err := callPlugin(s, r, spec.VolumeName(), spec.Plugin,
			func(ctx context.Context) (host.VolumeStatus, error) { return do(ctx, spec) })
		if err != nil {
			return nil, err
		}
		s.agent.Retry() // allocs may wait for it
		out := s.explainer().volumeView(st)
		out.Warnings = warnings
		return out, nil
	})
}

func (s *Server) volumeSpec(ctx context.Context, src VolumeSubmission) (host.VolumeSpec, []host.Diagnostic, error) {
	if src.Spec != nil {
		return *src.Spec, nil, nil
	}
	return s.host.ParseVolume(ctx, source(src.Submission), parseOptions(src.Submission))
}

// changeVolume changes the volume that the path names.
func (s *Server) changeVolume(
	r *http.Request, do func(context.Context, host.VolumeName) (host.VolumeStatus, error),
) (any, error) {
	name := volumeName(r)
	st, err := callPlugin(s, r, name, "", func(ctx context.Context) (host.VolumeStatus, error) { return do(ctx, name) })
	return s.explainer().volumeView(st), err
}

// expandVolume answers after the controller call. The node call may still be pending.
func (s *Server) expandVolume(r *http.Request, want host.CapacityRange) (any, error) {
	return s.changeVolume(r, func(ctx context.Context, n host.VolumeName) (host.VolumeStatus, error) {
		return s.host.ExpandVolume(ctx, n, want)
	})
}

// modifyVolume changes mutable parameters of a volume.
func (s *Server) modifyVolume(r *http.Request, parameters map[string]string) (any, error) {
	return s.changeVolume(r, func(ctx context.Context, n host.VolumeName) (host.VolumeStatus, error) {
		return s.host.ModifyVolume(ctx, n, parameters)
	})
}

func (s *Server) deleteVolume(r *http.Request) (any, error) {
	do := s.host.DeleteVolume
	if isTrue(r, "deregister") {
		do = s.host.DeregisterVolume
	}
	name := volumeName(r)
	return callPlugin(s, r, name, "", func(ctx context.Context) (struct{}, error) { return struct{}{}, do(ctx, name) })
}

// getStats returns the usage of a volume.
func (s *Server) getStats(r *http.Request) (any, error) {
	list, wait, late, err := limited(r.Context(), r, func(ctx context.Context) ([]host.VolumeUsage, error) {
		list, _, err := s.host.VolumeStats(ctx, volumeName(r))
		return list, err
	})
	if late {
		err = registry.Errorf(registry.ErrUnavailable, "waited %v: %s", wait,
			s.unanswered(r.Context(), volumeName(r), ""))
	}
	return append([]host.VolumeUsage{}, list...), err
}

// postDoctor inspects or repairs. After a repair the agent retries what waits.
func (s *Server) postDoctor(r *http.Request, ask DoctorRequest) (any, error) {
	found, err := callPlugin(s, r, host.VolumeName{}, "", func(ctx context.Context) (host.Diagnosis, error) {
		return s.host.Doctor(ctx, ask.Repair, ask.Digest)
	})
	if err == nil && ask.Repair {
		s.agent.Retry()
	}
	return found, err
}

// skew is how much earlier the shim's deadline timer may fire than that of the agent.
const skew = 100 * time.Millisecond

// callPlugin calls do within the time of the request. It gives up early when the plugin is gone for good. Work that has
// started continues, and the same request resumes it.
func callPlugin[T any](
	s *Server, r *http.Request, name host.VolumeName, plugin host.PluginID, do func(context.Context) (T, error),
) (T, error) {
	describeWait(r.Context(), func(ctx context.Context) string { return s.describeVolume(ctx, name, plugin) })
	ctx, cancel := context.WithCancelCause(r.Context())
	var watching sync.WaitGroup
	watching.Go(func() { cancel(s.awaitGone(ctx, name, plugin)) })
	out, wait, late, err := limited(ctx, r, do)
	cancel(nil)
	watching.Wait()
	reason, gone := "", context.Cause(ctx)
	switch {
	case late:
		reason = fmt.Sprintf("waited %v: %s", wait, s.unanswered(r.Context(), name, plugin))
	case err != nil && errors.Is(gone, registry.ErrUnavailable):
		reason = gone.Error()
	case errors.Is(err, registry.ErrUnavailable):
		if p := s.pluginOf(r.Context(), name, plugin); p != nil && p.failures() != "" {
			err = registry.Errorf(registry.ErrUnavailable, "%w; %s", err, p.failures())
		}
		return out, err
	default:
		return out, s.withEngines(name, err)
	}
	then := s.continues(r.Context(), name)
	if late {
		then = cmp.Or(then, "run the command again to resume")
	}
	if then != "" {
		reason += "; " + then
	}
	return out, registry.Errorf(registry.ErrUnavailable, "%s", reason)
}

// callWithin calls do within the time of the request. Work that has started continues.
func callWithin[T any](r *http.Request, what string, do func(context.Context) (T, error)) (T, error) {
	describeWait(r.Context(), func(context.Context) string { return "no answer about " + what + " yet" })
	out, wait, late, err := limited(r.Context(), r, do)
	if late {
		err = registry.Errorf(registry.ErrUnavailable, "waited %v for %s: %w; run the command again to resume", wait, what,
			err)
	}
	return out, err
}

// askPlugin is callWithin for a plugin that a job runs.
func askPlugin[T any](s *Server, r *http.Request, id host.PluginID, ask func(context.Context) (T, error)) (T, error) {
	return callWithin(r, "plugin "+string(id), func(ctx context.Context) (out T, err error) {
		if _, err = s.knownPlugin(ctx, id); err == nil {
			out, err = ask(ctx)
		}
		return out, err
	})
}

// continues returns a text if the volume's creation or deletion continues in the background.
func (s *Server) continues(ctx context.Context, name host.VolumeName) string {
	v := s.explainer().volume(ctx, name)
	switch {
	case v == nil:
		return ""
	case v.State == registry.VolumeDeleting:
		return fmt.Sprintf("the deletion continues in the background; see %s", volumeCommand("status", name))
	case v.State == registry.VolumeCreating || v.Intent != nil && v.Intent.RPC == registry.CreateVolumeRPC:
		return fmt.Sprintf("the creation continues in the background; see %s; "+
			"to cancel it, and delete what was created: %s; "+
			"to remove only the record: %s", volumeCommand("status", name), volumeCommand("delete", name),
			volumeCommand("deregister", name))
	}
	return ""
}

// pluginOf returns the plugin, or else the plugin of the volume; nil if that is unknown.
func (s *Server) pluginOf(ctx context.Context, name host.VolumeName, plugin host.PluginID) *Plugin {
	e := s.explainer()
	if v := e.volume(ctx, name); plugin == "" && v != nil {
		plugin = v.Plugin
	}
	if plugin == "" {
		return nil
	}
	p, err := s.plugin(ctx, plugin)
	if err != nil {
		return nil
	}
	return p
}

// goneInterval is the interval of checks whether the plugin of a request may still start.
const goneInterval = 500 * time.Millisecond

// awaitGone returns ErrUnavailable when the plugin is not running and all its jobs have ended, and nil when ctx ends.
func (s *Server) awaitGone(ctx context.Context, name host.VolumeName, plugin host.PluginID) error {
	tick := time.NewTicker(goneInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		p := s.pluginOf(ctx, name, plugin)
		if p == nil || !p.gone() {
			continue
		}
		text, start := fmt.Sprintf("plugin %q is not running: %s", p.ID, p.describeJobs()), Notice{}
		start.startCommands(p)
		for _, c := range start.Commands {
			text += fmt.Sprintf("; to %s: %s", c.Purpose, c.Line)
		}
		return registry.Errorf(registry.ErrUnavailable, "%s", text)
	}
}

// limited calls do within the time of the request, if it has one. late means that the time ran out.
func limited[T any](
	ctx context.Context, r *http.Request, do func(context.Context) (T, error),
) (out T, wait time.Duration, late bool, err error) {
	if wait, err = waitOf(r); err != nil {
		return out, 0, false, err
	}
	if wait == 0 {
		out, err = do(ctx)
		return out, 0, false, err
	}
	until := time.Now().Add(wait)
	limit, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	out, err = do(limit)
	return out, wait, err != nil && time.Until(until) <= skew && ctx.Err() == nil, err
}

// waitOf returns the time of the request; 0: it has no limit.
func waitOf(r *http.Request) (time.Duration, error) {
	wait, err := time.ParseDuration(cmp.Or(r.URL.Query().Get("wait"), "0s"))
	if err != nil || wait < 0 {
		return 0, registry.Invalid("wait: %q is not a duration", r.URL.Query().Get("wait"))
	}
	return wait, nil
}

// unanswered describes the call that has no answer yet.
func (s *Server) unanswered(ctx context.Context, name host.VolumeName, plugin host.PluginID) string {
	e := s.explainer()
	if v := e.volume(ctx, name); v != nil {
		plugin = v.Plugin
		for _, w := range v.Waiting {
			if w.Alloc == "" && w.Code != "" {
				return w.String()
			}
		}
	}
	if plugin == "" {
		return "no answer from the plugin (see holdfast plugin status)"
	}
	if p := e.plugin(ctx, plugin); !p.running() {
		return fmt.Sprintf("plugin %q is not running (see holdfast plugin status): %s", plugin, p.describeJobs())
	}
	return fmt.Sprintf("no answer from plugin %q (see %s)", plugin, pluginCommand(plugin))
}

func (s *Server) jobView(j *agent.JobRecord, all []*agent.AllocRecord) Job {
	out := Job{
		ID: j.Job.ID, Namespace: string(j.Job.Namespace), Type: j.Job.Type, Version: j.Version, Stopped: j.Stopped,
		Submitted: j.Submitted, Warnings: j.Warnings, Status: jobStatus(j, all),
	}
	out.Roll = s.rollView(j)
	if out.Status == agent.AllocPending {
		out.Waits = cmp.Or(s.agent.Shortage(), s.agent.DescribePaused(j.Job.ID))
	}
	counts := map[string]map[agent.AllocState]int{}
	_, fills := j.Slots()
	for _, g := range j.Job.Groups {
		v := Group{Name: g.Name, Count: g.Count, Volumes: g.Volumes, Allocs: map[agent.AllocState]int{}}
		for _, t := range g.Tasks {
			if t.Plugin != "" {
				v.Plugins = append(v.Plugins, t.Plugin)
			}
		}
		counts[g.Name] = v.Allocs
		out.Groups = append(out.Groups, v)
	}
	for _, r := range all {
		if r.Job != j.Job.ID {
			continue
		}
		v := allocView(r)
		v.Replaced = !fills(r)
		out.Allocs = append(out.Allocs, v)
		if counts[r.Group.Name] != nil {
			counts[r.Group.Name][r.State]++
		}
	}
	return out
}

// allocView describes an alloc without its plans and its tasks' configuration, which may hold secrets.
func allocView(r *agent.AllocRecord) Alloc {
	out := Alloc{
		ID: string(r.ID), Job: r.Job, Group: r.Group.Name, Index: r.Index, Version: r.Version, Namespace: r.Namespace,
		State: r.State, Reason: r.Reason, Next: r.Next, Created: r.Created, Ended: r.Ended, Notes: r.Notes,
	}
	for _, t := range r.Group.Tasks {
		rec := r.Tasks[t.Name]
		v := Task{
			Name: t.Name, Driver: t.Driver, Plugin: t.Plugin, State: rec.State, Failed: rec.Failed,
			Attempt: rec.Attempt, Restarts: rec.Restarts.Total, Since: rec.Since, Reason: rec.Reason,
		}
		if rec.Handle != nil {
			v.Notes = rec.Handle.Warnings
			if rec.State == agent.TaskRunning {
				v.PID = rec.Handle.TaskPID
			}
		}
		if rec.Exit != nil {
			v.ExitCode, v.Signal = &rec.Exit.Code, rec.Exit.Signal
		}
		out.Tasks = append(out.Tasks, v)
	}
	return out
}

// jobStatus returns the most significant state of the allocs: live states first, then failed, then the rest. A job
// that lacks allocs is pending.
func jobStatus(j *agent.JobRecord, all []*agent.AllocRecord) agent.AllocState {
	order := []agent.AllocState{
		agent.AllocStopped, agent.AllocComplete, agent.AllocFailed, agent.AllocReleasing, agent.AllocStopping,
		agent.AllocPending, agent.AllocRunning,
	}
	wanted, fills := j.Slots()
	most, have := -1, 0
	for _, r := range all {
		if r.Job != j.Job.ID {
			continue
		}
		filled := fills(r)
		if filled {
			have++
		}
		if filled || r.Version == j.Version || !r.State.Ended() {
			most = max(most, slices.Index(order, r.State))
		}
	}
	switch {
	case most >= 0 && (have >= wanted || !order[most].Ended()):
		return order[most]
	case j.Stopped:
		return agent.AllocStopped
	}
	return agent.AllocPending
}
