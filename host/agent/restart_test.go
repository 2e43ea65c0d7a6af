package agent

import (
	"encoding/json"
	"testing"
	"time"

	"holdfast/hooks"
)

func TestRestartPolicy(t *testing.T) {
	type end struct {
		after time.Duration // since the last end
		again bool
		delay time.Duration
	}
	second, minute := time.Second, time.Minute
	for name, c := range map[string]struct {
		policy Policy
		ends   []end
	}{
		"fail after the attempts are used up": {Policy{2, minute, second, ModeFail}, []end{
			{0, true, second}, {second, true, second}, {second, false, 0},
		}},
		"a new interval has all attempts again": {Policy{1, minute, second, ModeFail}, []end{
			{0, true, second}, {minute, true, second}, {second, false, 0},
		}},
		"delay waits for the end of the interval": {Policy{1, minute, second, ModeDelay}, []end{
			{0, true, second}, {10 * second, true, 50 * second}, {50 * second, true, minute},
		}},
		"never less than the delay":            {Policy{1, minute, second, ModeDelay}, []end{{0, true, second}, {minute - 1, true, second}}},
		"no attempts":                          {Policy{0, minute, second, ModeFail}, []end{{0, false, 0}}},
		"no attempts, and nothing to wait for": {Policy{0, minute, second, ModeDelay}, []end{{0, false, 0}}},
	} {
		t.Run(name, func(t *testing.T) {
			var tally Restarts
			now := time.Unix(1, 0)
			for i, e := range c.ends {
				now = now.Add(e.after)
				next, delay, again, why := c.policy.next(tally, now)
				if again != e.again || delay != e.delay {
					t.Errorf("end %d: again %v after %v, want %v after %v", i, again, delay, e.again, e.delay)
				}
				if !again && why == "" {
					t.Errorf("end %d: nobody is told why", i)
				}
				tally = next
			}
		})
	}
}

func TestRestartDefaultsAreNomads(t *testing.T) {
	for kind, want := range map[string]Policy{
		"service":  {2, 30 * time.Minute, 15 * time.Second, ModeFail},
		"system":   {2, 30 * time.Minute, 15 * time.Second, ModeFail},
		"batch":    {3, 24 * time.Hour, 15 * time.Second, ModeFail},
		"sysbatch": {3, 24 * time.Hour, 15 * time.Second, ModeFail},
	} {
		s, err := newTaskSpec(kind, tasks("g"), task("t", ""))
		if err != nil || s.policy != want {
			t.Errorf("%s: %+v, %v; want %+v", kind, s.policy, err, want)
		}
	}
}

func TestTaskRestartWinsOverGroup(t *testing.T) {
	g := hooks.Group{Name: "g", Rest: json.RawMessage(`{"restart":[{"attempts":7,"delay":"2s"}]}`)}
	s, err := newTaskSpec("service", g, task("t", `{"restart":[{"attempts":"4","mode":"delay"}]}`))
	if want := (Policy{4, 30 * time.Minute, 2 * time.Second, ModeDelay}); err != nil || s.policy != want {
		t.Errorf("%+v, %v; want %+v", s.policy, err, want)
	}
	for _, wrong := range []string{`{"restart":[{"mode":"never"}]}`, `{"restart":[{"delay":"soon"}]}`, `{"restart":[{"attempts":-1}]}`} {
		if _, err := newTaskSpec("service", tasks("g"), task("t", wrong)); err == nil {
			t.Errorf("%s is taken", wrong)
		}
	}
}
