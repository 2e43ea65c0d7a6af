package control

import (
	"cmp"
	"context"
	"net/http"
	"slices"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

// ParseOptions returns the options with which the shim parses a submission.
func ParseOptions(src Submission) host.ParseOptions {
	return host.ParseOptions{Variables: src.Variables, VariableFiles: src.Files, Dir: src.Dir}
}

func source(src Submission) host.Source { return host.Source{Name: src.Name, Text: src.Text} }

func (s *Server) postJob(r *http.Request, src Submission) (any, error) {
	job, _, err := s.host.Parse(r.Context(), source(src), ParseOptions(src))
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
	job, _, err := s.host.Parse(r.Context(), source(src), ParseOptions(src))
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
	s.setReasons(r.Context(), v.Allocs)
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
	s.setReasons(r.Context(), out)
	return out, nil
}

// setReasons sets what allocs wait for. If the shim does not answer, the agent's records stay.
func (s *Server) setReasons(ctx context.Context, allocs []Alloc) {
	s.setReasonsFrom(ctx, &volumeLister{Lister: s.host}, allocs)
}

// volumeLister is a Lister that answers all queries for volumes with the list of all volumes. It gets the list once.
type volumeLister struct {
	agent.Lister
	list []host.VolumeStatus
	err  error
	done bool
}

func (l *volumeLister) Volumes(ctx context.Context, _ host.VolumeQuery) ([]host.VolumeStatus, host.Seq, error) {
	if !l.done {
		l.list, _, l.err = l.Lister.Volumes(ctx, host.VolumeQuery{})
		l.done = true
	}
	return l.list, 0, l.err
}

// setReasonsFrom is setReasons for several lists of allocs, with a source of volumes.
func (s *Server) setReasonsFrom(ctx context.Context, volumes agent.Lister, lists ...[]Alloc) {
	var waiting []*Alloc
	for _, allocs := range lists {
		for i := range allocs {
			if allocs[i].waits() {
				waiting = append(waiting, &allocs[i])
			}
		}
	}
	if len(waiting) == 0 {
		return
	}
	list, _, err := s.host.Allocs(ctx, host.AllocQuery{})
	if err != nil {
		return
	}
	waits := map[string][]registry.Wait{}
	for _, st := range list {
		waits[string(st.ID)] = st.Waiting
	}
	problem := s.clusterProblem(ctx)
	for _, a := range waiting {
		if of, known := waits[a.ID]; known {
			a.setReason(withProblem(s.agent.DescribeWaits(ctx, volumes, of), problem))
		}
	}
}

// waits reports whether the alloc waits for its volumes, or for their release.
func (a *Alloc) waits() bool { return a.State == agent.AllocPending || a.State == agent.AllocReleasing }

// setReason sets what the alloc waits for. The shim's answer is newer than the agent's record.
func (a *Alloc) setReason(text string) {
	if text != "" && a.Ended.IsZero() {
		a.Reason = text
	}
}

// getAlloc returns an alloc with its volumes. If the shim does not answer, the volumes are left out.
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
	list, _, err := s.host.Allocs(r.Context(), host.AllocQuery{ID: rec.ID})
	if err != nil {
		out.Reason = "no answer from the shim: " + err.Error()
		return out, nil
	}
	e := s.explainer()
	for _, st := range list {
		text := s.agent.DescribeWaits(r.Context(), s.host, st.Waiting)
		if out.waits() {
			text = withProblem(text, s.clusterProblem(r.Context()))
			out.Notices = s.clusterNotices(r.Context())
		}
		out.setReason(text)
		out.Waiting, out.Notices = st.Waiting, append(out.Notices, e.explainWaits(r.Context(), st.Waiting)...)
		for _, u := range st.Volumes {
			use, notices := e.useView(rec.ID, u)
			out.Volumes, out.Notices = append(out.Volumes, use), append(out.Notices, notices...)
		}
	}
	return out, nil
}

// getVolumes lists the volumes with a record or, with ?at=PLUGIN, those that the plugin has.
func (s *Server) getVolumes(r *http.Request) (any, error) {
	if id := host.PluginID(query(r, "at")); id != "" {
		list, err := askPlugin(s, r, id, func(ctx context.Context) ([]host.PluginVolume, error) {
			return s.host.VolumesAtPlugin(ctx, id)
		})
		return append([]host.PluginVolume{}, list...), err
	}
	list, _, err := s.host.Volumes(r.Context(), host.VolumeQuery{Plugin: host.PluginID(query(r, "plugin"))})
	out, e := []Volume{}, s.explainer()
	for _, v := range list {
		out = append(out, e.volumeView(v))
	}
	return out, err
}

func (s *Server) getVolume(r *http.Request) (any, error) {
	return s.volumeNow(r.Context(), volumeName(r))
}

// volume returns a volume. If no volume has the name, or the name is empty, the error is ErrNotFound.
func (s *Server) volume(ctx context.Context, name host.VolumeName) (*host.VolumeStatus, error) {
	if name.ID == "" {
		return nil, registry.Errorf(registry.ErrNotFound, "the volume has no name")
	}
	list, _, err := s.host.Volumes(ctx, host.VolumeQuery{Name: name})
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(list, func(v host.VolumeStatus) bool { return v.VolumeName() == name })
	if i < 0 {
		return nil, registry.Errorf(registry.ErrNotFound, "volume %s not found; run holdfast volume list for a list",
			name)
	}
	return &list[i], nil
}

// volumeNow describes a volume with its uses, its waits and the agent's notices.
func (s *Server) volumeNow(ctx context.Context, name host.VolumeName) (any, error) {
	v, err := s.volume(ctx, name)
	if err != nil {
		return nil, err
	}
	e := s.explainer()
	e.volumes[name] = v
	out := e.volumeView(*v)
	for i, h := range out.Holders {
		if len(h.Engines) > 0 {
			// containers are only an addition, so an error is ignored
			out.Holders[i].Containers, _ = s.agent.EngineContainers(v.ID)
		}
	}
	out.Notices = slices.Concat(s.clusterNotices(ctx), s.lostNotices(ctx, name), e.explainWaits(ctx, v.Waiting),
		out.Notices)
	return out, nil
}

// namespaceOf returns the namespace of the object that a request names.
func namespaceOf(r *http.Request) registry.Namespace {
	return cmp.Or(registry.Namespace(query(r, "namespace")), registry.DefaultNamespace)
}

func volumeName(r *http.Request) host.VolumeName {
	return host.VolumeName{Namespace: namespaceOf(r), ID: registry.VolumeID(r.PathValue("id"))}
}

// register records a volume that exists at its plugin. It refuses a spec without an external ID.
func (s *Server) register(ctx context.Context, spec host.VolumeSpec) (host.VolumeStatus, error) {
	if spec.External == "" {
		return host.VolumeStatus{}, registry.Invalid(
			"volume %s has no external_id; add the ID that the plugin uses, or create the volume with holdfast "+
				"volume create", spec.VolumeName())
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
		if node := query(r, "node"); node != "" {
			spec.Node = registry.NodeName(node)
		}
		st, err := callPlugin(s, r, target{volume: spec.VolumeName(), plugin: spec.Plugin, node: spec.Node},
			func(ctx context.Context) (host.VolumeStatus, error) { return do(ctx, spec) })
		if err != nil {
			return nil, err
		}
		s.agent.Retry() // allocs may wait for the volume
		out := s.explainer().volumeView(st)
		out.Warnings = warnings
		return out, nil
	})
}

func (s *Server) volumeSpec(ctx context.Context, src VolumeSubmission) (host.VolumeSpec, []host.Diagnostic, error) {
	if src.Spec != nil {
		return *src.Spec, nil, nil
	}
	return s.host.ParseVolume(ctx, source(src.Submission), ParseOptions(src.Submission))
}

// changeVolume changes the volume that the path names. The answer has its uses too.
func (s *Server) changeVolume(
	r *http.Request, do func(context.Context, host.VolumeName) (host.VolumeStatus, error),
) (any, error) {
	name := volumeName(r)
	changed, err := callPlugin(s, r, target{volume: name},
		func(ctx context.Context) (host.VolumeStatus, error) { return do(ctx, name) })
	if err != nil {
		return nil, err
	}
	if now, err := s.volumeNow(r.Context(), name); err == nil {
		return now, nil
	}
	return s.explainer().volumeView(changed), nil // the change itself has succeeded
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
	return callPlugin(s, r, target{volume: name, removal: true},
		func(ctx context.Context) (struct{}, error) { return struct{}{}, do(ctx, name) })
}

// getStats returns how much of a volume is used and free, by unit.
func (s *Server) getStats(r *http.Request) (any, error) {
	name := volumeName(r)
	list, expired, err := callWithLimit(r.Context(), r, func(ctx context.Context) ([]host.VolumeUsage, error) {
		list, _, err := s.host.VolumeStats(ctx, name)
		return list, err
	})
	if expired > 0 {
		err = registry.Errorf(registry.ErrUnavailable, "waited %v: %s", expired,
			s.describeCall(r.Context(), target{volume: name}))
	}
	return append([]host.VolumeUsage{}, list...), err
}

// postDoctor inspects or repairs. After a repair the agent retries allocs that wait.
func (s *Server) postDoctor(r *http.Request, ask DoctorRequest) (any, error) {
	found, err := callPlugin(s, r, target{}, func(ctx context.Context) (host.Diagnosis, error) {
		return s.host.Doctor(ctx, ask.Repair, ask.Digest)
	})
	if err == nil && ask.Repair {
		s.agent.Retry()
	}
	if err == nil {
		found.Findings = s.adviseLost(r.Context(), found.Findings)
		s.adviseFailing(r.Context(), found.Findings)
	}
	return found, err
}
