package control

import (
	"context"
	"fmt"
	"net/http"
	"net/url"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

// JobSource is a job as it was submitted.
type JobSource struct {
	ID        string            `json:"id"`
	Version   uint64            `json:"version"`
	File      string            `json:"file"` // the path as it was given
	Text      string            `json:"text"`
	Variables map[string]string `json:"variables,omitempty"`
}

func (s *Server) getJobSource(r *http.Request) (any, error) {
	id := r.PathValue("id")
	rec, err := s.agent.Job(id)
	if err != nil {
		return nil, err
	}
	src := rec.Source
	return JobSource{ID: id, Version: rec.Version, File: src.Name, Text: string(src.Text), Variables: src.Variables},
		nil
}

// JobSource returns a job as it was submitted.
func (c *Client) JobSource(ctx context.Context, id string) (JobSource, error) {
	return get[JobSource](ctx, c, "/job/"+segment(id)+"/source")
}

// postStartJob submits the current version of a job again. It changes nothing if the job has not ended or is complete.
func (s *Server) postStartJob(r *http.Request) (any, error) {
	rec, err := s.agent.Job(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	all := s.agent.Allocs()
	switch status := jobStatus(rec, all); {
	case !rec.Stopped && (!status.Ended() || status == agent.AllocComplete):
		return s.jobView(rec, all), nil
	case len(rec.Source.Text) == 0:
		return nil, registry.Errorf(registry.ErrUnsupported,
			"the agent has no text of job %q; use holdfast job run FILE", rec.Job.ID)
	}
	return s.postJob(r, rec.Source)
}

// StartJob submits the current version of a stopped or failed job again. It changes nothing if the job has not ended or
// is complete.
func (c *Client) StartJob(ctx context.Context, id string) (Job, error) {
	return post[Job](ctx, c, "/job/"+segment(id)+"/start", nil)
}

func (s *Server) postRestart(r *http.Request) (any, error) {
	rec, err := s.agent.Find(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	return s.agent.RestartAlloc(r.Context(), rec.ID, host.TaskName(query(r, "task")), s.host,
		isTrue(r, "force"))
}

// RestartAlloc restarts a task of an alloc in place, or all running tasks if task is empty. It returns their names.
func (c *Client) RestartAlloc(ctx context.Context, id, task string, force bool) ([]host.TaskName, error) {
	q := url.Values{"task": {task}, "force": {fmt.Sprint(force)}}
	return post[[]host.TaskName](ctx, c, "/alloc/"+segment(id)+"/restart?"+q.Encode(), nil)
}

func (s *Server) postStopAlloc(r *http.Request) (any, error) {
	rec, err := s.agent.Find(r.PathValue("id"))
	if err == nil {
		err = s.agent.StopAlloc(r.Context(), rec.ID, s.host, isTrue(r, "force"))
	}
	return struct{}{}, err
}

// StopAlloc stops an alloc. Its job places another one.
func (c *Client) StopAlloc(ctx context.Context, id string, force bool) error {
	_, err := post[struct{}](ctx, c, "/alloc/"+segment(id)+"/stop?"+url.Values{"force": {fmt.Sprint(force)}}.Encode(),
		nil)
	return err
}
