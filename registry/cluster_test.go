package registry

import "testing"

// TestEndedCallIsLateAtFormerExecutors ends a call that three nodes have begun: the holder, a former executor and a node
// that has settled its calls. It may still run at the former executor.
func TestEndedCallIsLateAtFormerExecutors(t *testing.T) {
	e := Executor{Holder: "a", Former: []NodeName{"a", "b", "other"}}
	call, senders := LateCall{For: "default/data", RPC: DeleteVolumeRPC, Failed: true}, []NodeName{"a", "b", "settled"}
	for _, again := range []bool{false, true} {
		next, same := e.Ended(call, senders)
		if late := next.Late; same != again || len(late) != 1 || late[0].Node != "b" || !late[0].Same(call) ||
			!late[0].Failed {
			t.Errorf("again %v: same %v, %+v", again, same, late)
		}
		e = next
	}
}
