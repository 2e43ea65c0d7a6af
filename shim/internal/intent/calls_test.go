package intent

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// While a plugin has an old and a new instance, a call for a volume normally goes to the new one. It goes to the old
// one if the same call may still run there, or if the old one is healthy and serves the volume's mount.
func TestCallsGoToTheInstanceThatServesTheVolume(t *testing.T) {
	key := registry.VolumeKey{Plugin: "p", External: "x"}
	old, next := registry.TaskKey{Alloc: "old", Task: "t"}, registry.TaskKey{Alloc: "next", Task: "t"}
	staging := func(server registry.TaskKey) registry.Record {
		return registry.Staging{Volume: key, State: registry.MarkDone, Server: server}
	}
	open := func(rpc registry.RPC, outcome registry.Outcome, code string) registry.Record {
		return registry.Intent{Volume: key, RPC: rpc, At: old, Outcome: outcome, Code: code, Attempt: 1}
	}
	for name, c := range map[string]struct {
		record registry.Record
		role   registry.Role
		health registry.HealthState // of the old instance
		want   registry.TaskKey
	}{
		"nothing known":               {staging(registry.TaskKey{}), registry.RoleNode, registry.Healthy, next},
		"served by the old one":       {staging(old), registry.RoleNode, registry.Healthy, old},
		"served by a sick one":        {staging(old), registry.RoleNode, registry.Unhealthy, next},
		"controllers serve no mounts": {staging(old), registry.RoleController, registry.Healthy, next},
		"published by the old one": {registry.Ref{Volume: key, Alloc: "a", Request: "r", Server: old},
			registry.RoleNode, registry.Healthy, old},
		"a call that may run": {open(registry.NodeStageRPC, registry.OutcomePending, ""), registry.RoleNode,
			registry.Healthy, old},
		"ABORTED": {open(registry.ControllerPublishRPC, registry.OutcomeUncertain, "ABORTED"), registry.RoleController,
			registry.Healthy, old},
		"an uncertain call that has ended": {open(registry.NodeStageRPC, registry.OutcomeUncertain, "INTERNAL"),
			registry.RoleNode, registry.Healthy, next},
		"a call of the other role": {open(registry.ControllerPublishRPC, registry.OutcomePending, ""),
			registry.RoleNode, registry.Healthy, next},
	} {
		t.Run(name, func(t *testing.T) {
			log := registrytest.NewLog(time.Now)
			table := registry.New(log)
			log.OnApplied(table.Applied)
			for _, task := range []registry.TaskKey{old, next} {
				in := registry.Instance{InstanceKey: registry.InstanceKey{Role: c.role, Plugin: "p", Alloc: task.Alloc,
					Task: task.Task}, Health: registry.Health{State: registry.Healthy}}
				if task == old {
					in.Health.State = c.health
				}
				registrytest.Put(t, log, in)
			}
			registrytest.Put(t, log, c.record)
			calls := Calls{Sender: Sender{State: log, Now: time.Now}, Plugins: table}
			got, err := calls.AwaitFor(t.Context(), Caller{}, c.role, key)
			if err != nil || got.TaskKey() != c.want {
				t.Errorf("the call goes to %s, %v; want %s", got.TaskKey(), err, c.want)
			}
			if got, _ := calls.FindFor(t.Context(), c.role, key); got.TaskKey() != c.want {
				t.Errorf("FindFor returns %s, want %s", got.TaskKey(), c.want)
			}
		})
	}
}

// If an instance goes away during a call, another instance gets the next try. The intent names that instance before the
// try is sent.
func TestTryAtAnotherInstanceIsRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := registrytest.NewLog(time.Now)
		table := registry.New(log)
		log.OnApplied(table.Applied)
		key := registry.VolumeKey{Plugin: "p", External: "x"}
		instance := func(alloc registry.AllocID, health registry.HealthState) registry.Record {
			return registry.Instance{
				InstanceKey: registry.InstanceKey{Role: registry.RoleNode, Plugin: "p", Alloc: alloc, Task: "t"},
				Health:      registry.Health{State: health},
			}
		}
		registrytest.Put(t, log, instance("old", registry.Healthy))
		calls := Calls{Sender: Sender{State: log, Now: time.Now}, Plugins: table}
		var sent []registry.AllocID
		err := calls.Send(t.Context(), Caller{}, Call{
			Intent: registry.Intent{Volume: key, RPC: registry.NodeStageRPC, Hash: "h"},
		}, func(_ context.Context, inst registry.Instance) error {
			_ = log.View(t.Context(), func(v registry.View) error {
				if open, _ := registry.OpenIntent(v, key); open.At != inst.TaskKey() {
					t.Errorf("the intent names %s, the call goes to %s", open.At, inst.TaskKey())
				}
				return nil
			})
			if sent = append(sent, inst.Alloc); len(sent) > 1 {
				return nil
			}
			registrytest.Put(t, log, instance("next", registry.Healthy), instance("old", registry.Unhealthy))
			return &registry.CallError{RPC: registry.NodeStageRPC, Code: "UNAVAILABLE"}
		})
		if err != nil || !slices.Equal(sent, []registry.AllocID{"old", "next"}) {
			t.Errorf("sent to %v, %v", sent, err)
		}
	})
}

// If the instance of a try could not be recorded, the try is not sent, neither at once nor when it is repeated.
func TestTryWaitsUntilItsInstanceIsRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := registrytest.NewLog(time.Now)
		first, next := registry.TaskKey{Alloc: "first", Task: "t"}, registry.TaskKey{Alloc: "next", Task: "t"}
		selected, sent := 0, 0
		c := stage(func(context.Context) error {
			if sent++; sent == 1 {
				return answer("UNAVAILABLE", registry.OutcomeUncertain)
			}
			if open, _, _, _ := look(t, log); open.At != next {
				t.Errorf("the intent names %s", open.At)
			}
			return nil
		})
		c.Intent.At = first
		c.Select = func(context.Context) (registry.TaskKey, error) {
			switch selected++; selected {
			case 1:
				return first, nil
			case 2:
				log.Fail(registry.Errorf(registry.ErrUnavailable, "disk full"))
			}
			return next, nil
		}
		if err := send(t.Context(), log, c); err != nil || sent != 2 || selected != 3 {
			t.Errorf("%v; selected %d times, sent %d times", err, selected, sent)
		}
	})
}

// TestCallsOfOtherNodesDoNotWait opens a call for a volume and checks whether another call waits for it on node a, one
// of several nodes. The volume is attached to the plugin's node a-id.
func TestCallsOfOtherNodesDoNotWait(t *testing.T) {
	key := registry.VolumeKey{Plugin: "p", External: "v"}
	attach := func(node registry.NodeID) registry.Intent {
		return registry.Intent{Volume: key, RPC: registry.ControllerPublishRPC, Node: node}
	}
	stage, expand := registry.Intent{Volume: key, RPC: registry.NodeStageRPC},
		registry.Intent{Volume: key, RPC: registry.ControllerExpandRPC}
	for name, c := range map[string]struct {
		open, next registry.Intent
		node       registry.NodeName // empty: there is a single node
		waits      bool
	}{
		"stage, attached elsewhere":                {attach("b-id"), stage, "a", false},
		"stage, attached here":                     {attach("a-id"), stage, "a", true},
		"stage, expanded":                          {expand, stage, "a", true},
		"attach elsewhere, staged":                 {stage, attach("b-id"), "a", false},
		"attach here, staged":                      {stage, attach("a-id"), "a", true},
		"attach elsewhere, attached here":          {attach("a-id"), attach("b-id"), "a", true},
		"expand, staged":                           {stage, expand, "a", true},
		"stage, attached elsewhere, a single node": {attach("b-id"), stage, "", true},
	} {
		log := registrytest.NewLog(time.Now)
		registrytest.Put(t, log, registry.Attachment{Volume: key, Node: "a", NodeID: "a-id"})
		registrytest.Put(t, log, c.open)
		_ = log.View(t.Context(), func(v registry.View) error {
			open, waits := (Sender{Node: c.node}).OpenCall(v, c.next)
			if waits != c.waits || waits && open.RPC != c.open.RPC {
				t.Errorf("%s: %v, %v", name, open.RPC, waits)
			}
			return nil
		})
	}
}
