package agent

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"holdfast/host"
	"holdfast/registry"
)

// How often the shim is asked what an alloc waits for while a call for its volumes is under way, and how long it may take to say so.
const (
	firstLook = 500 * time.Millisecond
	lastLook  = 15 * time.Second
	lookLimit = 2 * time.Second
)

// followed does what may take long, and notes meanwhile what the alloc waits for.
func (r *runner) followed(ctx context.Context, do func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { r.follow(ctx) })
	defer wg.Wait()
	defer cancel()
	return do()
}

func (r *runner) follow(ctx context.Context) {
	for wait := newPause([2]time.Duration{firstLook, lastLook}); ; {
		wait.sleep(ctx, nil)
		waiting := r.waiting(ctx)
		if ctx.Err() != nil {
			return
		}
		if len(waiting) > 0 && r.waits(r.a.InWords(ctx, r.s, waiting), 0) != nil {
			return // what cannot be written down ends the agent
		}
	}
}

// waiting is what the shim says that the alloc waits for. A shim that cannot be asked says nothing.
func (r *runner) waiting(ctx context.Context) []registry.Wait {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	list, _, err := r.s.Allocs(ctx, r.id)
	if err != nil || len(list) == 0 {
		return nil
	}
	return list[0].Waiting
}

// told is why the alloc's volumes are not ready, as it is told of the alloc; err, if nothing is.
func (r *runner) told(ctx context.Context, err error) string {
	if waiting := r.waiting(ctx); len(waiting) > 0 {
		return r.a.InWords(ctx, r.s, waiting)
	}
	return err.Error()
}

// advised is told, with what a person may do.
func (r *runner) advised(ctx context.Context, err error) string {
	text := r.told(ctx, err)
	for _, w := range r.waiting(ctx) {
		if w.Advice != "" {
			text += "; " + w.Advice
		}
	}
	return text
}

// Holders says who holds volumes.
type Holders interface {
	Volumes(ctx context.Context, q host.VolumeQuery) ([]host.VolumeStatus, host.Seq, error)
}

// InWords is what is waited for, in one line. It names the jobs that hold a volume: a shim knows only allocs.
func (a *Agent) InWords(ctx context.Context, h Holders, list []registry.Wait) string {
	texts := make([]string, len(list))
	for i, w := range list {
		texts[i] = w.String()
		if held := a.heldBy(ctx, h, w); held != "" {
			texts[i] = fmt.Sprintf("volume %s is held by %s", w.Volume, held)
		}
	}
	return strings.Join(texts, "; ")
}

// heldBy names who holds the volume whose claim is waited for; empty: nobody, or it is not known.
func (a *Agent) heldBy(ctx context.Context, h Holders, w registry.Wait) string {
	if w.Step != registry.StepClaim {
		return ""
	}
	list, _, err := h.Volumes(ctx, host.VolumeQuery{Name: w.Volume})
	var names []string
	for _, v := range list {
		if err != nil || v.VolumeName() != w.Volume {
			continue
		}
		for _, holder := range v.Holders {
			if holder.Claim.Alloc != w.Alloc {
				names = append(names, a.holder(holder.Claim.Alloc))
			}
		}
	}
	return strings.Join(names, " and ")
}

func (a *Agent) holder(id host.AllocID) string {
	name := "alloc " + short(id)
	if r := a.record(id); r != nil {
		name += " of job " + r.Job
	}
	return name
}

// waits notes what the alloc waits for, if that is new, and how long it is until the shim is asked again; 0: it is being asked.
func (r *runner) waits(why string, pause time.Duration) error {
	next := time.Time{}
	if pause > 0 {
		next = time.Now().UTC().Add(pause)
	}
	if rec := r.record(); rec.Reason == why && rec.Next.Equal(next) {
		return nil
	}
	return r.update(func(rec *AllocRecord) {
		if rec.Reason != why {
			rec.note("", "waits: %s", why)
		}
		rec.Reason, rec.Next = why, next
	})
}
