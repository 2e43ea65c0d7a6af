package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/internal/display"
	"holdfast/registry"
)

func parseOptions(src Submission) host.ParseOptions {
	return host.ParseOptions{Variables: src.Variables, VariableFiles: src.Files}
}

func (s *Server) postJob(r *http.Request) (any, error) {
	var src Submission
	if err := readBody(r, &src); err != nil {
		return nil, err
	}
	job, _, err := s.host.Parse(r.Context(), host.Source{Name: src.Name, Text: src.Text}, parseOptions(src))
	if err != nil {
		return nil, err
	}
	rec, err := s.agent.Submit(r.Context(), job, src, s.host,
		agent.SubmitOptions{Force: truth(r, "force"), Rerun: truth(r, "rerun")})
	if err != nil {
		return nil, err
	}
	return s.jobView(rec, s.agent.Allocs()), nil
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
	for _, j := range s.agent.Jobs() {
		if j.Job.ID == r.PathValue("id") {
			v := s.jobView(j, s.agent.Allocs())
			s.reasons(r.Context(), v.Allocs)
			return v, nil
		}
	}
	return nil, registry.Errorf(registry.ErrNotFound, "job %q not found (see holdfast job status)", r.PathValue("id"))
}

func (s *Server) deleteJob(r *http.Request) (any, error) {
	id := r.PathValue("id")
	err := s.agent.StopJob(r.Context(), id, s.host,
		agent.StopOptions{Purge: truth(r, "purge"), Force: truth(r, "force")})
	return struct{}{}, err
}

func (s *Server) getAllocs(r *http.Request) (any, error) {
	out := []Alloc{}
	for _, rec := range s.agent.Allocs() {
		out = append(out, allocView(rec))
	}
	s.reasons(r.Context(), out)
	return out, nil
}

// getAlloc returns an alloc with its volumes. Without an answer from the shim the volumes are left out.
func (s *Server) getAlloc(r *http.Request) (any, error) {
	rec, err := s.agent.Find(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	out := allocView(rec)
	if !rec.UsesVolumes() || rec.State.Ended() {
		return out, nil
	}
	list, _, err := s.host.Allocs(r.Context(), rec.ID)
	if err != nil {
		out.Waits = "no answer from the shim: " + err.Error()
		return out, nil
	}
	for _, st := range list {
		e := s.explainer()
		out.waits(s.agent.DescribeWaits(r.Context(), s.host, st.Waiting))
		out.Waiting = e.waits(r.Context(), st.Waiting)
		for _, u := range st.Uses {
			use := useView(u)
			use.Growth, use.Unhealthy = growth(u.Name, u.Expansion), unhealthy(u.Name, u.Volume.Plugin, u.Health)
			use.Trouble = e.trouble(u.Trouble, u.Troubled, u.Name, u.Volume.Plugin, rec.ID)
			out.Volumes = append(out.Volumes, use)
		}
	}
	return out, nil
}

// plugins returns the plugins that the shim knows.
func (s *Server) plugins(ctx context.Context, q host.PluginQuery) ([]Plugin, error) {
	list, _, err := s.host.Plugins(ctx, q)
	if err != nil {
		return nil, err
	}
	enough := errors.New("enough")
	var prints []host.PluginFingerprint
	err = s.host.Fingerprints(ctx, q, func(all []host.PluginFingerprint, complete bool) error {
		prints = append(prints, all...)
		if complete {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) {
		return nil, err
	}
	return pluginViews(list, prints), nil
}

// shownPlugins returns plugins with the roles that jobs define and no task serves.
func (s *Server) shownPlugins(ctx context.Context, q host.PluginQuery) ([]Plugin, error) {
	list, err := s.plugins(ctx, q)
	if err != nil {
		return nil, err
	}
	return withWanted(list, q, s.agent.Jobs(), s.agent.Allocs()), nil
}

func (s *Server) getPlugins(r *http.Request) (any, error) {
	return s.shownPlugins(r.Context(), host.PluginQuery{})
}

func (s *Server) getPlugin(r *http.Request) (any, error) {
	id := host.PluginID(r.PathValue("id"))
	list, err := s.shownPlugins(r.Context(), host.PluginQuery{Plugin: id})
	if err != nil {
		return nil, err
	}
	for _, p := range list {
		if p.ID == string(id) {
			return p, nil
		}
	}
	return nil, registry.Errorf(registry.ErrNotFound, "plugin %q not found; run holdfast plugin status for a list", id)
}

func (s *Server) volumes(ctx context.Context, q host.VolumeQuery) ([]Volume, error) {
	list, _, err := s.host.Volumes(ctx, q)
	if err != nil {
		return nil, err
	}
	out, e := []Volume{}, s.explainer()
	for _, v := range list {
		out = append(out, volumeView(v, e))
	}
	return out, nil
}

func (s *Server) getVolumes(r *http.Request) (any, error) {
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
			out := volumeView(v, e)
			out.Waiting = e.waits(r.Context(), v.Waiting)
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
			"volume %s has no external_id; add the ID that the plugin uses, or create the volume with holdfast volume create", spec.VolumeName())
	}
	return s.host.RegisterVolume(ctx, spec)
}

// postVolume creates or registers a volume from its text.
func (s *Server) postVolume(do func(context.Context, host.VolumeSpec) (host.VolumeStatus,
	error)) func(*http.Request) (any, error) {
	return func(r *http.Request) (any, error) {
		var src Submission
		if err := readBody(r, &src); err != nil {
			return nil, err
		}
		spec, _, err := s.host.ParseVolume(r.Context(), host.Source{Name: src.Name, Text: src.Text}, parseOptions(src))
		if err != nil {
			return nil, err
		}
		var st host.VolumeStatus
		err = s.inTime(r, spec.VolumeName(), spec.Plugin, func(ctx context.Context) (err error) {
			st, err = do(ctx, spec)
			return err
		})
		if err != nil {
			return nil, err
		}
		s.agent.Retry()
		return volumeView(st, s.explainer()), nil
	}
}

// expandVolume answers after the controller call. The node call may still be pending.
func (s *Server) expandVolume(r *http.Request) (any, error) {
	var want host.CapacityRange
	if err := readBody(r, &want); err != nil {
		return nil, err
	}
	var st host.VolumeStatus
	err := s.inTime(r, volumeName(r), "", func(ctx context.Context) (err error) {
		st, err = s.host.ExpandVolume(ctx, volumeName(r), want)
		return err
	})
	return volumeView(st, s.explainer()), err
}

func (s *Server) deleteVolume(r *http.Request) (any, error) {
	do := s.host.DeleteVolume
	if truth(r, "deregister") {
		do = s.host.DeregisterVolume
	}
	return struct{}{}, s.inTime(r, volumeName(r), "", func(ctx context.Context) error { return do(ctx, volumeName(r)) })
}

// getStats returns the usage of a volume.
func (s *Server) getStats(r *http.Request) (any, error) {
	out := []Usage{}
	wait, late, err := limited(r, func(ctx context.Context) error {
		list, _, err := s.host.VolumeStats(ctx, volumeName(r))
		for _, u := range list {
			out = append(out, Usage(u))
		}
		return err
	})
	if late {
		err = registry.Errorf(registry.ErrUnavailable, "waited %v: %s", wait,
			s.unanswered(r.Context(), volumeName(r), ""))
	}
	return out, err
}

// postDoctor inspects or repairs. After a repair the agent retries what waits.
func (s *Server) postDoctor(r *http.Request) (any, error) {
	var ask Consultation
	if err := readBody(r, &ask); err != nil {
		return nil, err
	}
	var found host.Diagnosis
	err := s.inTime(r, host.VolumeName{}, "", func(ctx context.Context) (err error) {
		found, err = s.host.Doctor(ctx, ask.Repair, ask.Digest)
		return err
	})
	if err == nil && ask.Repair {
		s.agent.Retry()
	}
	return found, err
}

// skew is how much earlier than ours the shim's deadline timer may fire.
const skew = 100 * time.Millisecond

// inTime calls do within the time of the request. Work that has started continues, and the same request resumes it.
func (s *Server) inTime(r *http.Request, name host.VolumeName, plugin host.PluginID,
	do func(context.Context) error) error {
	wait, late, err := limited(r, func(ctx context.Context) error { return s.whileItMayCome(ctx, name, plugin, do) })
	if !late {
		return s.withFailures(r.Context(), err, name, plugin)
	}
	then := cmp.Or(s.goesOn(r.Context(), name), "run the command again to resume")
	return registry.Errorf(registry.ErrUnavailable, "waited %v: %s; %s", wait,
		s.unanswered(r.Context(), name, plugin), then)
}

// goesOn returns a text if the volume's creation or deletion continues in the background.
func (s *Server) goesOn(ctx context.Context, name host.VolumeName) string {
	v := s.explainer().volume(ctx, name)
	switch {
	case v == nil:
		return ""
	case v.State == registry.VolumeDeleting:
		return fmt.Sprintf("the deletion continues in the background; see %s", volumeCommand("status", name))
	case v.State == registry.VolumeCreating || v.Intent != nil && v.Intent.RPC == registry.CreateVolumeRPC:
		return fmt.Sprintf("the creation continues in the background; see %s; to cancel it, run holdfast volume delete or deregister",
			volumeCommand("status", name))
	}
	return ""
}

// fateEvery is the interval of checks whether the plugin of a request may still start.
const fateEvery = 500 * time.Millisecond

// errEnded ends a wait for a plugin whose jobs have all ended.
type errEnded struct{ error }

func (e errEnded) Unwrap() error { return e.error }

// whileItMayCome calls do, and gives up when the plugin is not running and all its jobs have ended.
func (s *Server) whileItMayCome(
	asked context.Context, name host.VolumeName, plugin host.PluginID, do func(context.Context) error,
) error {
	ctx, cancel := context.WithCancelCause(asked)
	defer cancel(nil)
	looked := make(chan struct{})
	go func() {
		defer close(looked)
		tick := time.NewTicker(fateEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			if err := s.ended(ctx, name, plugin); err != nil {
				cancel(errEnded{err})
			}
		}
	}()
	err := do(ctx)
	var ended errEnded
	gone := err != nil && errors.As(context.Cause(ctx), &ended)
	cancel(nil)
	<-looked
	if !gone {
		return err
	}
	if then := s.goesOn(asked, name); then != "" {
		ended.error = registry.Errorf(registry.ErrUnavailable, "%w; %s", ended.error, then)
	}
	return ended
}

// pluginFor returns the plugin, or else the plugin of the volume; empty if unknown.
func (s *Server) pluginFor(ctx context.Context, name host.VolumeName, plugin host.PluginID) host.PluginID {
	if plugin != "" {
		return plugin
	}
	if v := s.explainer().volume(ctx, name); v != nil {
		return v.Plugin
	}
	return ""
}

// withFailures adds the failures of a plugin's jobs to an ErrUnavailable. The shim does not know failed tasks.
func (s *Server) withFailures(ctx context.Context, err error, name host.VolumeName, plugin host.PluginID) error {
	if !errors.Is(err, registry.ErrUnavailable) || errors.As(err, new(errEnded)) {
		return err
	}
	if plugin = s.pluginFor(ctx, name, plugin); plugin == "" {
		return err
	}
	list, look := s.shownPlugins(ctx, host.PluginQuery{Plugin: plugin})
	if says := roleFailures(list); look == nil && says != "" {
		return registry.Errorf(registry.ErrUnavailable, "%w; %s", err, says)
	}
	return err
}

// ended returns ErrUnavailable if the plugin is not running and all its jobs have ended; nil if not, or if unknown.
func (s *Server) ended(ctx context.Context, name host.VolumeName, plugin host.PluginID) error {
	plugin = s.pluginFor(ctx, name, plugin)
	p := &Plugin{ID: string(plugin), Jobs: s.runners(plugin)}
	over := func(r Runner) bool { return agent.AllocState(r.Status).Ended() }
	if plugin == "" || len(p.Jobs) == 0 || slices.ContainsFunc(p.Jobs, func(r Runner) bool { return !over(r) }) {
		return nil
	}
	if list, err := s.plugins(ctx, host.PluginQuery{Plugin: plugin}); err != nil || len(list) > 0 {
		return nil
	}
	text := fmt.Sprintf("plugin %q is not running: %s", plugin, p.fate())
	for _, do := range p.start() {
		text += fmt.Sprintf("; to %s: %s", do.Why, do.Command)
	}
	return registry.Errorf(registry.ErrUnavailable, "%s", text)
}

// limited calls do within the time of the request, if it has one. late means that the time ran out.
func limited(r *http.Request, do func(context.Context) error) (wait time.Duration, late bool, err error) {
	wait, err = time.ParseDuration(cmp.Or(r.URL.Query().Get("wait"), "0s"))
	if err != nil || wait < 0 {
		return 0, false, registry.Invalid("wait: %q is not a duration", r.URL.Query().Get("wait"))
	}
	if wait == 0 {
		return 0, false, do(r.Context())
	}
	until := time.Now().Add(wait)
	ctx, cancel := context.WithDeadline(r.Context(), until)
	defer cancel()
	err = do(ctx)
	return wait, err != nil && time.Until(until) <= skew && r.Context().Err() == nil, err
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
	p := e.plugin(ctx, plugin)
	if len(p.Instances) == 0 && len(p.Tasks) == 0 {
		return fmt.Sprintf("plugin %q is not running (see holdfast plugin status): %s", plugin, p.fate())
	}
	return fmt.Sprintf("no answer from plugin %q (see %s)", plugin,
		display.Command("holdfast plugin status", string(plugin)))
}
