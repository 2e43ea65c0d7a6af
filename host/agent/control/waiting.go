package control

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

// requestHeader names a request, so that its client can ask what the request waits for.
const requestHeader = "Holdfast-Request"

// waitDescription is the function that describes what a named request in flight waits for, once its handler has set it.
type waitDescription = atomic.Pointer[func(context.Context) string]

// waitDescriptionKey is the key of the *waitDescription in the context of a named request.
type waitDescriptionKey struct{}

// registerNamed registers a request, if it has a name, until end is called.
func (s *Server) registerNamed(r *http.Request) (_ *http.Request, end func()) {
	id := r.Header.Get(requestHeader)
	if id == "" {
		return r, func() {}
	}
	description := &waitDescription{}
	s.waits.Store(id, description)
	return r.WithContext(context.WithValue(r.Context(), waitDescriptionKey{}, description)),
		func() { s.waits.Delete(id) }
}

// setWaitDescription sets the function that describes what the request waits for.
func setWaitDescription(ctx context.Context, describe func(context.Context) string) {
	if description, named := ctx.Value(waitDescriptionKey{}).(*waitDescription); named {
		description.Store(&describe)
	}
}

// waitText says what a request waits for. It is empty if that is not known.
type waitText struct {
	Text string `json:"text"`
}

func (s *Server) getWait(r *http.Request) (any, error) {
	description, open := s.waits.Load(r.PathValue("id"))
	if !open {
		return waitText{}, nil
	}
	text := ""
	if describe := description.(*waitDescription).Load(); describe != nil {
		text = (*describe)(r.Context())
	}
	return waitText{withProblem(text, s.clusterProblem(r.Context()))}, nil
}

// noAnswer begins a text about a wait whose reason is not known.
const noAnswer = "no answer "

// withProblem adds a problem of the cluster, which may be empty, to the text about a wait.
func withProblem(text, problem string) string {
	switch {
	case problem == "" || strings.Contains(text, problem):
		return text
	case text == "" || strings.HasPrefix(text, noAnswer):
		return problem
	}
	return problem + "; " + text
}

// clusterProblem says why changes of the cluster's records wait. It is empty if they do not wait, or if the shim does
// not answer.
func (s *Server) clusterProblem(ctx context.Context) string {
	st, err := s.host.Status(ctx)
	if err != nil {
		return ""
	}
	return st.ClusterProblem
}

// clusterNotices explains a problem of the cluster.
func (s *Server) clusterNotices(ctx context.Context) []Notice {
	problem := s.clusterProblem(ctx)
	if problem == "" {
		return nil
	}
	return []Notice{{Kind: NoticeTrouble, Summary: problem,
		Meaning: "Tasks and mounts are not affected. Claims, attachments and changes of volumes wait. Data about " +
			"other nodes is out of date.",
		Next: "Waiting operations continue by themselves."}}
}

// awaitJob answers with a job once the allocs of its version have started or ended, and the plugins of its running
// allocs are healthy.
func (s *Server) awaitJob(r *http.Request) (any, error) {
	ctx, id := r.Context(), r.PathValue("id")
	setWaitDescription(ctx, func(ctx context.Context) string { return s.describeJob(ctx, id) })
	var job Job
	var jobErr error
	err := s.agent.Await(ctx, func([]*agent.AllocRecord) bool {
		if job, jobErr = s.job(id); jobErr != nil {
			return true
		}
		return startedOrEnded(job) && len(s.describeUnhealthy(ctx, job)) == 0
	})
	if err != nil {
		return nil, err
	}
	return job, jobErr
}

// startedOrEnded reports whether all allocs that a job wants have started or ended.
func startedOrEnded(j Job) bool {
	if j.Roll != nil && j.Roll.State == agent.RollStarting {
		return false
	}
	want, have := 0, 0
	for _, g := range j.Groups {
		want += g.Count
	}
	for _, a := range j.Allocs {
		switch {
		case isAwaited(j, a):
			return false
		case !a.Replaced:
			have++
		}
	}
	return have >= want || j.Stopped
}

// isAwaited reports whether a job still waits for an alloc. It waits for a new alloc to start. It waits for a replaced
// alloc to end, unless a roll keeps that alloc.
func isAwaited(j Job, a Alloc) bool {
	kept := j.Roll != nil && slices.ContainsFunc(j.Roll.Kept, func(k RollAlloc) bool { return string(k.ID) == a.ID })
	switch {
	case a.Replaced:
		return a.Ended.IsZero() && !kept
	case a.State == agent.AllocRunning:
		return slices.ContainsFunc(a.Tasks, Task.notStarted)
	}
	return a.State != agent.AllocComplete && a.State != agent.AllocFailed
}

// notStarted reports whether an attempt of the task is about to start, no attempt has run yet, or the task has failed
// and thereby ends its alloc. For example, its image is still being pulled, or its engine does not answer.
func (t Task) notStarted() bool {
	return t.State == agent.TaskPending || t.State == agent.TaskStarting || t.Failed ||
		t.State == agent.TaskWaiting && t.Restarts == 0
}

// describeUnhealthy lists the plugins of a job's running allocs that are not healthy, with the reasons. It includes
// plugins about which the shim does not answer.
func (s *Server) describeUnhealthy(ctx context.Context, j Job) (texts []string) {
	for _, a := range j.Allocs {
		for _, t := range a.Tasks {
			if t.Plugin == "" || a.Replaced || a.State != agent.AllocRunning {
				continue
			}
			p, err := s.plugin(ctx, t.Plugin)
			if err != nil {
				texts = append(texts, fmt.Sprintf("plugin %s: %v", t.Plugin, err))
				continue
			}
			key := registry.TaskKey{Alloc: host.AllocID(a.ID), Task: t.Name}
			current := p.task(key)
			if current.Healthy {
				continue
			}
			text := fmt.Sprintf("plugin %s is not healthy yet", t.Plugin)
			if current.Problem != "" {
				text += ": " + current.Problem
			}
			for _, i := range p.Instances {
				if i.TaskKey() == key && i.Health.State == registry.Unhealthy {
					text += ": " + WithDetail(i.Health.Cause, i.Health.Detail)
					break
				}
			}
			if why := cmp.Or(t.Reason, a.Reason); why != "" {
				text += ": " + why
			}
			texts = append(texts, text)
		}
	}
	return texts
}

// describeJob says what the start of a job waits for.
func (s *Server) describeJob(ctx context.Context, id string) string {
	job, err := s.job(id)
	if err != nil {
		return err.Error()
	}
	var texts []string
	if job.Waits != "" {
		texts = append(texts, job.Waits)
	}
	if job.Roll != nil && job.Roll.State == agent.RollStarting {
		texts = append(texts, job.Roll.String())
	}
	s.setReasons(ctx, job.Allocs)
	for _, a := range job.Allocs {
		if isAwaited(job, a) {
			texts = append(texts, a.describe())
		}
	}
	return joinTexts("job "+id, append(texts, s.describeUnhealthy(ctx, job)...))
}

// describe returns one line about the state of an alloc.
func (a Alloc) describe() string {
	text := fmt.Sprintf("alloc %s is %s", short(a.ID), a.State)
	if a.Reason != "" {
		text += ": " + a.Reason
	}
	return text
}

// joinTexts joins at most three texts that say what a subject waits for.
func joinTexts(subject string, texts []string) string {
	const most = 3
	if len(texts) == 0 {
		return subject + ": the reason is not known"
	}
	if more := len(texts) - most; more > 0 {
		texts = append(texts[:most:most], fmt.Sprintf("and %d more", more))
	}
	return subject + ": " + strings.Join(texts, "; ")
}

// awaitStopped answers when all allocs of a job have ended. The job need not exist any more.
func (s *Server) awaitStopped(r *http.Request) (any, error) {
	ctx, id := r.Context(), r.PathValue("id")
	remains := func(r *agent.AllocRecord) bool { return r.Job == id && !r.State.Ended() }
	setWaitDescription(ctx, func(ctx context.Context) string {
		var open []Alloc
		for _, r := range s.agent.Allocs() {
			if remains(r) {
				open = append(open, allocView(r))
			}
		}
		s.setReasons(ctx, open)
		var texts []string
		for _, a := range open {
			texts = append(texts, a.describe())
		}
		return joinTexts("job "+id, texts)
	})
	return struct{}{}, s.agent.Await(ctx,
		func(all []*agent.AllocRecord) bool { return !slices.ContainsFunc(all, remains) })
}

// rollCheck is the interval at which a roll is checked even without a change of its record. Held also depends on
// running calls, which are not in the record.
const rollCheck = 2 * time.Second

// awaitRoll answers with a plugin once its rolls differ from the ones that the client knows, or no roll is in progress.
func (s *Server) awaitRoll(r *http.Request) (any, error) {
	ctx, id := r.Context(), pluginID(r)
	setWaitDescription(ctx, func(ctx context.Context) string { return s.describeRolls(ctx, id) })
	var plugin *Plugin
	var pluginErr error
	for {
		limited, cancel := context.WithTimeout(ctx, rollCheck)
		err := s.agent.Await(limited, func([]*agent.AllocRecord) bool {
			plugin, pluginErr = s.plugin(ctx, id)
			return pluginErr != nil || !plugin.Rolling() || plugin.RollText() != query(r, "known")
		})
		cancel()
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return plugin, errors.Join(err, pluginErr)
		}
	}
}

// describeRolls says what the rolls of a plugin wait for.
func (s *Server) describeRolls(ctx context.Context, id host.PluginID) string {
	plugin, err := s.plugin(ctx, id)
	if err != nil {
		return err.Error()
	}
	var texts []string
	for _, r := range plugin.Rolls {
		if r.State == agent.RollStarting || r.State == agent.RollDraining {
			texts = append(texts, r.String())
		}
	}
	return joinTexts("plugin "+string(id), texts)
}

// AwaitRoll returns a plugin once its rolls have changed, or no roll is in progress.
func (c *Client) AwaitRoll(ctx context.Context, known Plugin) (Plugin, error) {
	q := url.Values{"known": {known.RollText()}}
	return get[Plugin](ctx, c, "/plugin/"+segment(known.ID)+"/await?"+q.Encode())
}

// Times of the reports about a call that has no answer yet.
const (
	firstReport    = 2 * time.Second
	reportInterval = time.Second
)

// reportWait calls c.Waiting, if set, at intervals until stop is called. It returns the name for the request. The last
// call of c.Waiting has an empty text.
func (c *Client) reportWait(ctx context.Context) (id string, stop func()) {
	if c.Waiting == nil {
		return "", func() {}
	}
	id, since := rand.Text(), time.Now()
	ctx, cancel := context.WithCancel(ctx)
	asking := *c
	asking.Waiting = nil
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(firstReport):
		}
		defer c.Waiting("", since)
		tick := time.NewTicker(reportInterval)
		defer tick.Stop()
		for {
			limited, done := context.WithTimeout(ctx, reportInterval) // to report also a wait for an agent that hangs
			wait, err := get[waitText](limited, &asking, "/wait/"+id)
			done()
			if ctx.Err() != nil {
				return
			}
			if err != nil || wait.Text == "" {
				wait.Text = noAnswer + "from the agent yet"
			}
			c.Waiting(wait.Text, since)
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	return id, func() {
		cancel()
		wg.Wait()
	}
}

// Report calls Waiting, unless it is nil.
func (c *Client) Report(text string, since time.Time) {
	if c.Waiting != nil {
		c.Waiting(text, since)
	}
}

// AwaitStopped returns when the tasks of a job have ended and its volumes are released.
func (c *Client) AwaitStopped(ctx context.Context, id string) error {
	_, err := get[struct{}](ctx, c, "/job/"+segment(id)+"/stopped")
	return err
}

// AwaitJob returns a job once the allocs of its version have started or ended and its plugins are healthy.
func (c *Client) AwaitJob(ctx context.Context, id string) (Job, error) {
	return get[Job](ctx, c, "/job/"+segment(id)+"/await")
}
