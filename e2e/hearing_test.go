package e2e

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"holdfast/host"
	"holdfast/registry"
)

// hearing is somebody who is told the events of a siege from its beginning, and goes on after the last one that they were told, whoever dies.
type hearing struct {
	record
	deaf      func()
	listening sync.WaitGroup
}

// hears begins to listen.
func (s *siege) hears() {
	ctx, cancel := context.WithCancel(s.ctx())
	s.heard.deaf = cancel
	s.heard.listening.Go(func() {
		for ctx.Err() == nil {
			_ = s.client.Events(ctx, uint64(s.heard.last()), true, func(e host.Event) error { s.heard.add(e); return nil })
			pause(ctx, retry) // no agent answers: the next one may
		}
	})
	s.t.Cleanup(s.hushed)
}

// hushed ends that.
func (s *siege) hushed() { s.heard.deaf(); s.heard.listening.Wait() }

// history is all events, as somebody else is told them now: up to the end of the plugin's task.
func (s *siege) history() (all []host.Event) {
	s.t.Helper()
	s.wait("the end of the plugin's task is told", func() bool {
		all = nil
		err := s.client.Events(s.ctx(), 0, false, func(e host.Event) error { all = append(all, e); return nil })
		return err == nil && slices.ContainsFunc(all, func(e host.Event) bool { return e.Kind == registry.EventTaskRemoved })
	})
	return all
}

// toldRight: after everything was taken down, whoever has listened all the time was told what is told now, and that is what was done.
func (s *siege) toldRight() {
	s.t.Helper()
	history := s.history()
	s.wait("all is heard", func() bool { return s.heard.last() >= history[len(history)-1].Seq })
	s.hushed()
	problems := misheard(s.heard.all(), history)
	for _, problem := range append(problems, untrue(s.heard.all(), s.created)...) {
		s.t.Error(problem)
	}
	s.t.Logf("%d events were told, of %d volumes that were acknowledged", len(s.heard.all()), len(s.created))
}

// misheard says where what was told in the course of time differs from what is told now, which may have lost its beginning by its length.
func misheard(told, now []host.Event) (problems []string) {
	if len(now) > 0 && now[0].Kind == host.EventResync {
		from := now[0].Seq
		now = now[1:]
		told = slices.DeleteFunc(slices.Clone(told), func(e host.Event) bool { return e.Seq <= from })
	}
	if problem := other(told, now); problem != "" {
		problems = append(problems, problem)
	}
	return problems
}

// untrue says where events do not add up to nothing, where they tell of a plugin that was sick, as none was, and where a volume whose creation was
// acknowledged, and which was deleted, was not told to be created once and deleted once.
func untrue(told []host.Event, made []string) (problems []string) {
	problems = append(replay(told), healthOf(told, nil)...)
	times := map[string]int{}
	for _, e := range told {
		if e.Kind == "volume created" || e.Kind == "volume deleted" {
			times[fmt.Sprintf("%s %s", e.Kind, e.Volume.ID)]++
		}
	}
	for what, n := range times {
		if n > 1 {
			problems = append(problems, fmt.Sprintf("%q is told %d times", what, n))
		}
	}
	for _, id := range made {
		for _, what := range []string{"volume created " + id, "volume deleted " + id} {
			if times[what] == 0 {
				problems = append(problems, fmt.Sprintf("%q was acknowledged, and is never told", what))
			}
		}
	}
	return problems
}

// TestSiegeEventsAreJudged: what judges the events of a siege finds one that is lost, told twice, out of order, of nothing, or of no sickness.
func TestSiegeEventsAreJudged(t *testing.T) {
	event := func(seq host.Seq, kind host.EventKind) host.Event {
		e := host.Event{Seq: seq, Kind: kind, Plugin: "fake"}
		switch kind {
		case "volume created", "volume deleted":
			e.Volume = host.VolumeName{Namespace: "default", ID: "v"}
		default:
			e.Role, e.Alloc = host.RoleNode, "alloc"
		}
		return e
	}
	sound := []host.Event{event(1, "registered"), event(3, "volume created"), event(4, "volume deleted"), event(7, "deregistered")}
	with := func(at int, more ...host.Event) []host.Event { return slices.Insert(slices.Clone(sound), at, more...) }
	without := func(at int) []host.Event { return slices.Delete(slices.Clone(sound), at, at+1) }
	again := with(3, event(5, "volume created"), event(6, "volume deleted"))
	sick := with(3, event(5, "unhealthy"), event(6, "healthy"))
	gap := with(2, event(3, host.EventResync))
	neither := slices.Delete(slices.Clone(sound), 1, 3)
	for what, c := range map[string]struct {
		told, now []host.Event
		made      []string
		is        bool
	}{
		"all is told once":            {sound, sound, []string{"v"}, true},
		"the beginning is forgotten":  {sound, append([]host.Event{event(3, host.EventResync)}, sound[2:]...), []string{"v"}, true},
		"and more than that":          {sound, append([]host.Event{event(3, host.EventResync)}, sound[3:]...), []string{"v"}, false},
		"one is lost on the way":      {without(2), sound, []string{"v"}, false},
		"one is lost for everybody":   {without(2), without(2), []string{"v"}, false},
		"both of a volume are":        {neither, neither, []string{"v"}, false},
		"one is told twice":           {with(1, sound[1]), sound, []string{"v"}, false},
		"two change their places":     {[]host.Event{sound[0], sound[2], sound[1], sound[3]}, sound, []string{"v"}, false},
		"one is made twice":           {again, again, []string{"v"}, false},
		"the plugin was never sick":   {sick, sick, []string{"v"}, false},
		"a volume is not told at all": {sound, sound, []string{"v", "w"}, false},
		"a gap is told":               {gap, gap, []string{"v"}, false},
	} {
		if problems := append(misheard(c.told, c.now), untrue(c.told, c.made)...); (len(problems) == 0) != c.is {
			t.Errorf("%s: %q", what, problems)
		}
	}
}
