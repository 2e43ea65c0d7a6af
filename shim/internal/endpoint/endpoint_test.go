package endpoint

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	driver "holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Each method of the specification has an effect. Each method that begins or ends a use has a volume and a target.
func TestEffectsCoverTheSpecification(t *testing.T) {
	known := map[string]bool{}
	services := csi.File_csi_proto.Services()
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			m := methods.Get(j)
			name := fmt.Sprintf("%s/%s", services.Get(i).Name(), m.Name())
			known[name] = true
			e, listed := effects[name]
			if !listed {
				t.Errorf("%s has no effect", name)
			}
			rpc, input := registry.RPC(m.Name()), m.Input().Fields()
			if e == effectEnd {
				rpc = beginningOf[rpc]
			}
			if e == effectBegin || e == effectEnd {
				if target := targets[rpc]; target == "" || input.ByName(target) == nil ||
					input.ByName("volume_id") == nil {
					t.Errorf("%s has no volume, or no target %q", name, target)
				}
			}
		}
	}
	for name := range effects {
		if !known[name] {
			t.Errorf("%s is no method of the specification", name)
		}
	}
}

const volume, target = "vol-1", "/task/target"

var key = registry.VolumeKey{Plugin: "disk", External: volume}

// env is an endpoint of plugin disk. The function answer answers its calls.
type env struct {
	*Endpoint
	t      *testing.T
	answer func(ctx context.Context, call driver.Passed) (answered bool, err error)

	repeated bool // calls are sent as repeated ones
	tasks    []registry.Role

	fuse bool // the plugin's mounts are FUSE mounts

	mu      sync.Mutex // guards the fields below
	sent    []string
	sentTo  []registry.AllocID
	members []registry.AllocID // instances, newest first; the first one is active
	absent  bool               // the plugin has no instance at the moment
}

func newEnv(t *testing.T) *env {
	e := &env{t: t, tasks: []registry.Role{registry.RoleController, registry.RoleNode}}
	e.reply(nil)
	calls := intent.Calls{
		Sender: intent.Sender{State: registrytest.NewLog(time.Now), Now: time.Now}, Plugins: e, Locks: &intent.Locks{},
		Expected: func(_ registry.View, role registry.Role, id registry.PluginID) bool {
			return id == key.Plugin && slices.Contains(e.tasks, role)
		},
	}
	e.members = []registry.AllocID{"a"}
	e.Endpoint = &Endpoint{Calls: calls, Instances: e, Node: "n",
		Served: func(path string) bool { return e.fuse && path == "/host/target" }}
	return e
}

func (e *env) setAbsent(is bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.absent = is
}

func (e *env) Find(role registry.Role, id registry.PluginID) (registry.Instance, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.instanceOf(role, id, e.members[0]), id == key.Plugin && slices.Contains(e.tasks, role) && !e.absent
}

func (e *env) instanceOf(role registry.Role, id registry.PluginID, alloc registry.AllocID) registry.Instance {
	return registry.Instance{InstanceKey: registry.InstanceKey{Role: role, Plugin: id, Alloc: alloc, Task: "t"},
		Volumes: registry.Tree{Host: "/host", Task: "/task"}, Health: registry.Health{State: registry.Healthy}}
}

func (e *env) Members(role registry.Role, id registry.PluginID) (all []registry.Instance) {
	for _, alloc := range e.members {
		all = append(all, e.instanceOf(role, id, alloc))
	}
	return all
}

func (e *env) Await(ctx context.Context, role registry.Role, id registry.PluginID) (registry.Instance, error) {
	for {
		if in, found := e.Find(role, id); found {
			return in, nil
		}
		select {
		case <-ctx.Done():
			return registry.Instance{}, context.Cause(ctx)
		case <-time.After(time.Second):
		}
	}
}

func (e *env) Pass(
	ctx context.Context, at registry.InstanceKey, call driver.Passed, reply func(*emptypb.Empty) error,
) (bool, error) {
	e.mu.Lock()
	e.sent = append(e.sent, string(call.RPC)+" to "+string(at.Role))
	e.sentTo = append(e.sentTo, at.Alloc)
	e.mu.Unlock()
	answered, err := e.answer(ctx, call)
	if err == nil {
		err = reply(call.Message)
	}
	return answered, err
}

// call makes one call of a client.
func (e *env) call(ctx context.Context, full string, request proto.Message) error {
	return e.Endpoint.Pass(ctx, Request{Plugin: key.Plugin, Method: "/csi.v1." + full, Message: raw(e.t, request),
		Repeated: e.repeated}, func(*emptypb.Empty) error { return nil })
}

// run makes the call of a step.
func (e *env) run(ctx context.Context, s step) error { return e.call(ctx, s.method, s.request) }

// reply answers all further calls with the error, or with OK.
func (e *env) reply(err error) {
	e.answer = func(context.Context, driver.Passed) (answered bool, _ error) { return true, err }
}

// raw returns the message as a server without its type gets it.
func raw(t *testing.T, m proto.Message) *emptypb.Empty {
	t.Helper()
	text, err := proto.Marshal(m)
	must(t, err)
	var out emptypb.Empty
	must(t, proto.Unmarshal(text, &out))
	return &out
}

func (e *env) uses() (list []string) {
	e.t.Helper()
	err := e.State.View(context.Background(), func(v registry.View) error {
		for _, u := range v.EndpointUses(key) {
			list = append(list, u.String())
		}
		return nil
	})
	must(e.t, err)
	return list
}

func failed(outcome registry.Outcome) *registry.CallError {
	return &registry.CallError{Code: "INVALID_ARGUMENT", Outcome: outcome, Kind: registry.ErrInvalid, Detail: "no"}
}

func lost() *registry.CallError {
	return &registry.CallError{Code: "UNAVAILABLE", Outcome: registry.OutcomeUncertain, Lost: true}
}

// step is a call of a client, with the plugin's answers to its tries and the uses that are recorded after it.
type step struct {
	method  string
	request proto.Message
	answers []error // nil: the last one is OK
	uses    []string
}

func publish(answers ...error) step {
	return step{"Node/NodePublishVolume", &csi.NodePublishVolumeRequest{VolumeId: volume, TargetPath: target}, answers,
		[]string{"NodePublishVolume at /task/target"}}
}

func TestUsesAreRecordedUntilTheyEnd(t *testing.T) {
	refused, uncertain := failed(registry.OutcomeFailed), failed(registry.OutcomeUncertain)
	unpublish := step{"Node/NodeUnpublishVolume",
		&csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: target}, nil, nil}
	attach := func(node string, uses ...string) step {
		return step{"Controller/ControllerPublishVolume",
			&csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: node}, nil, uses}
	}
	detach := func(node string, uses ...string) step {
		return step{"Controller/ControllerUnpublishVolume",
			&csi.ControllerUnpublishVolumeRequest{VolumeId: volume, NodeId: node}, nil, uses}
	}
	with := func(s step, answers []error, uses ...string) step {
		s.answers, s.uses = answers, uses
		return s
	}
	const used = "NodePublishVolume at /task/target"
	remove := step{"Controller/DeleteVolume", &csi.DeleteVolumeRequest{VolumeId: volume}, nil, nil}
	expand := step{"Controller/ControllerExpandVolume", &csi.ControllerExpandVolumeRequest{VolumeId: volume}, nil, nil}
	for name, steps := range map[string][]step{
		"published and unpublished": {publish(), unpublish},
		"refused":                   {with(publish(refused), []error{refused})},
		"uncertain":                 {publish(uncertain), unpublish},
		"refused when repeated":     {publish(), publish(refused), unpublish},
		"lost, then refused":        {publish(lost(), refused), unpublish},
		"unpublish fails":           {publish(), with(unpublish, []error{refused}, used), unpublish},
		"another place": {publish(), with(step{"Node/NodeUnpublishVolume",
			&csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: "/other"}, nil, nil}, nil, used)},
		"detached from one node": {
			attach("n1", "ControllerPublishVolume at n1"),
			attach("n2", "ControllerPublishVolume at n1", "ControllerPublishVolume at n2"),
			detach("n1", "ControllerPublishVolume at n2"),
		},
		"detached from every node": {
			attach("n1", "ControllerPublishVolume at n1"), detach(""),
		},
		"deletion uncertain": {with(remove, []error{uncertain}, "DeleteVolume"), remove},
		"deletion refused":   {with(remove, []error{refused})},
		"deletion refused after an uncertain one": {with(remove, []error{uncertain}, "DeleteVolume"),
			with(remove, []error{refused}, "DeleteVolume"), remove},
		"expansion refused after an uncertain one": {with(expand, []error{uncertain}, "ControllerExpandVolume"),
			with(expand, []error{refused}, "ControllerExpandVolume"), expand},
		"uncertain, then refused": {publish(uncertain), publish(refused)},
		"deleted":                 {publish(), remove},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEnv(t)
				for i, s := range steps {
					answers := slices.Clone(s.answers)
					e.answer = func(context.Context, driver.Passed) (answered bool, err error) {
						if want := strings.TrimPrefix(s.method, "Node/"); strings.HasPrefix(want, "NodePublish") &&
							len(e.uses()) == 0 {
							t.Error("the use is not recorded before the call")
						}
						if len(answers) > 0 {
							err, answers = answers[0], answers[1:]
						}
						failure, _ := errors.AsType[*registry.CallError](err)
						return failure == nil || !failure.Lost, err
					}
					var want error
					if len(s.answers) > 0 {
						want = s.answers[len(s.answers)-1]
					}
					if err := e.run(t.Context(), s); !errors.Is(err, want) {
						t.Fatalf("step %d: %v, want %v", i, err, want)
					}
					if uses := e.uses(); !slices.Equal(uses, s.uses) {
						t.Errorf("after step %d: uses %q, want %q", i, uses, s.uses)
					}
				}
			})
		})
	}
}

// A place that no record can have is an error of the client, and the plugin gets no call.
func TestLongPlaceIsInvalid(t *testing.T) {
	e := newEnv(t)
	e.answer = func(context.Context, driver.Passed) (bool, error) { return true, errors.New("called") }
	long := step{method: "Node/NodePublishVolume", request: &csi.NodePublishVolumeRequest{
		VolumeId: volume, TargetPath: "/" + strings.Repeat("x", 1<<20)}}
	if err := e.run(t.Context(), long); !errors.Is(err, registry.ErrInvalid) || len(e.uses()) > 0 {
		t.Errorf("%.200v, uses %d; want ErrInvalid and no use", err, len(e.uses()))
	}
}

// One call ends more uses of a volume than one commit removes. Forget also removes them all.
func TestManyUsesEnd(t *testing.T) {
	for name, end := range map[string]func(*env) error{
		"detached from every node": func(e *env) error {
			e.reply(nil)
			return e.call(t.Context(), "Controller/ControllerUnpublishVolume",
				&csi.ControllerUnpublishVolumeRequest{VolumeId: volume})
		},
		"forgotten": func(e *env) error {
			return e.Forget(t.Context(), key, registry.Force{By: "ada", Confirm: volume})
		},
	} {
		e := newEnv(t)
		var uses []registry.Record
		for i := range 3 * registry.Batch {
			uses = append(uses, registry.EndpointUse{Volume: key, Call: registry.ControllerPublishRPC, Node: e.Node,
				Target: fmt.Sprint("n", i)})
		}
		registrytest.Put(t, e.State, uses...)
		if err := end(e); err != nil || len(e.uses()) != 0 {
			t.Errorf("%s: %v, %d uses are left", name, err, len(e.uses()))
		}
	}
}

// A call that a killed shim has not answered may have taken effect. So its use stays if the repeated call is refused,
// or cannot be made in time. The undo ends the use.
func TestUseOfAKilledShimsCallIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t)
		use := registry.EndpointUse{Volume: key, Call: registry.NodePublishRPC, Target: target, Node: e.Node}
		registrytest.Put(t, e.State, use)
		refused := failed(registry.OutcomeFailed)
		e.reply(refused)
		if err := e.run(t.Context(), publish()); !errors.Is(err, refused) || len(e.uses()) != 1 {
			t.Errorf("%v, uses %q", err, e.uses())
		}
		e.answer = func(context.Context, driver.Passed) (bool, error) {
			e.setAbsent(true)
			return false, lost()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := e.run(ctx, publish()); !errors.Is(err, context.DeadlineExceeded) || len(e.uses()) != 1 {
			t.Errorf("%v, uses %q", err, e.uses())
		}
		e.setAbsent(false)
		e.reply(nil)
		err := e.call(t.Context(), "Node/NodeUnpublishVolume",
			&csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: target})
		if err != nil || len(e.uses()) != 0 {
			t.Errorf("%v, uses %q", err, e.uses())
		}
	})
}

// releasing is the State of a shim that releases the state while a commit is under way. It then answers as a
// store.Store does.
type releasing struct {
	registry.State
	release context.CancelCauseFunc
}

func (s releasing) Commit(ctx context.Context, decisions ...registry.Decision) (registry.Seq, error) {
	s.release(intent.ErrReleased)
	synctest.Wait()
	at, err := s.State.Commit(context.WithoutCancel(ctx), decisions...)
	if ctx.Err() != nil {
		return 0, registry.Errorf(registry.ErrUncertain, "commit under way: %w", context.Cause(ctx))
	}
	return at, err
}

// A shim that releases the state before it sends a call leaves no use of the call, not even if it releases the state
// while the use is recorded: the next shim would take the call for sent.
func TestUseOfACallThatIsNotSentEndsWithItsShim(t *testing.T) {
	for _, recording := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			e := newEnv(t)
			e.Drain = intent.DrainTime
			e.answer = func(ctx context.Context, _ driver.Passed) (bool, error) {
				if ctx.Err() == nil {
					t.Error("it is sent")
				}
				return false, &registry.CallError{Code: "CANCELLED", Outcome: registry.OutcomeFailed}
			}
			ctx, release := context.WithCancelCause(t.Context())
			if recording {
				e.State = releasing{e.State, release}
			} else {
				release(intent.ErrReleased)
			}
			if err := e.run(ctx, publish()); err == nil || len(e.uses()) > 0 {
				t.Errorf("recording %t: %v, uses %q", recording, err, e.uses())
			}
		})
	}
}

// While two instances run, a call of unknown outcome is repeated at the instance that may still run it.
func TestUncertainCallIsRepeatedWhereItMayRun(t *testing.T) {
	e := newEnv(t)
	e.members = []registry.AllocID{"old"}
	uncertain := failed(registry.OutcomeUncertain)
	e.reply(uncertain)
	if err := e.run(t.Context(), publish()); !errors.Is(err, uncertain) {
		t.Fatal(err)
	}
	e.members = []registry.AllocID{"new", "old"}
	e.reply(nil)
	for range 2 { // the outcome is known before the second call, which goes to the active instance
		must(t, e.run(t.Context(), publish()))
	}
	if want := []registry.AllocID{"old", "old", "new"}; !slices.Equal(e.sentTo, want) {
		t.Errorf("calls went to %q, want %q", e.sentTo, want)
	}
}

// changing are the calls that change a volume or its use.
var changing = []string{"Controller/DeleteVolume", "Controller/ControllerPublishVolume",
	"Controller/ControllerUnpublishVolume", "Controller/ControllerExpandVolume", "Controller/ControllerModifyVolume",
	"Node/NodeStageVolume", "Node/NodeUnstageVolume", "Node/NodePublishVolume", "Node/NodeUnpublishVolume",
	"Node/NodeExpandVolume"}

// Calls that would change a volume that is registered in Holdfast are refused and not sent. Other calls are sent.
func TestVolumesOfHoldfastAreNotChanged(t *testing.T) {
	e := newEnv(t)
	own := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "data", Plugin: key.Plugin,
		External: key.External}, State: registry.VolumeReady}
	registrytest.Put(t, e.State, own)
	for _, name := range slices.Sorted(maps.Keys(effects)) {
		m, _ := parseMethod("/csi.v1." + name)
		request, err := m.decode(&emptypb.Empty{})
		must(t, err)
		field := request.ProtoReflect().Descriptor().Fields().ByName("volume_id")
		if field == nil {
			continue
		}
		request.ProtoReflect().Set(field, protoreflect.ValueOfString(volume))
		e.sent = nil
		err = e.call(t.Context(), name, request)
		refused := status.Code(Status(err)) == codes.FailedPrecondition &&
			strings.Contains(err.Error(), "registered in Holdfast as data")
		if want := slices.Contains(changing, name); refused != want || (len(e.sent) == 0) != want {
			t.Errorf("%s: %v, sent %q", name, err, e.sent)
		}
	}
}

// Clients can read a snapshot or group snapshot that has a record in Holdfast. Only Holdfast deletes it.
func TestSnapshotsOfHoldfastAreNotDeleted(t *testing.T) {
	e := newEnv(t)
	group := registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: "default", ID: "g",
		Volumes: []registry.VolumeID{"data"}}, Plugin: key.Plugin, External: "group-1", State: registry.SnapshotReady,
		Members: []registry.GroupMember{{Volume: "data", Source: key.External, External: "snap-1"}}}
	registrytest.Put(t, e.State, group)
	for _, c := range []struct {
		method  string
		request proto.Message
		refused bool
	}{
		{"GroupController/DeleteVolumeGroupSnapshot", &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: "group-1"},
			true},
		{"GroupController/DeleteVolumeGroupSnapshot", &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: "group-2",
			SnapshotIds: []string{"snap-1"}}, true},
		{"Controller/DeleteSnapshot", &csi.DeleteSnapshotRequest{SnapshotId: "snap-1"}, true},
		{"GroupController/GetVolumeGroupSnapshot", &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: "group-1"},
			false},
		{"SnapshotMetadata/GetMetadataAllocated", &csi.GetMetadataAllocatedRequest{SnapshotId: "snap-1"}, false},
		{"GroupController/DeleteVolumeGroupSnapshot", &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: "group-2",
			SnapshotIds: []string{"snap-2"}}, false},
	} {
		e.sent = nil
		err := e.call(t.Context(), c.method, c.request)
		if refused := status.Code(Status(err)) == codes.FailedPrecondition; refused != c.refused ||
			(len(e.sent) == 0) != c.refused {
			t.Errorf("%s %v: %v, sent %q", c.method, c.request, err, e.sent)
		}
	}
}

// Calls that name the same object wait for each other. Calls for other objects do not.
func TestCallsForOneObjectAreMadeOneAtATime(t *testing.T) {
	for name, c := range map[string]struct {
		first, second step
		waits         bool
	}{
		"one volume": {publish(), step{method: "Node/NodeGetVolumeStats",
			request: &csi.NodeGetVolumeStatsRequest{VolumeId: volume}}, true},
		"a snapshot of the volume": {publish(), step{method: "Controller/CreateSnapshot",
			request: &csi.CreateSnapshotRequest{SourceVolumeId: volume, Name: "s"}}, true},
		"a group with the volume": {publish(), step{method: "GroupController/CreateVolumeGroupSnapshot",
			request: &csi.CreateVolumeGroupSnapshotRequest{SourceVolumeIds: []string{"a", volume, "z"}}}, true},
		"one name": {step{method: "Controller/CreateVolume", request: &csi.CreateVolumeRequest{Name: "v"}},
			step{method: "Controller/CreateVolume", request: &csi.CreateVolumeRequest{Name: "v"}}, true},
		"two volumes": {publish(), step{method: "Node/NodeGetVolumeStats",
			request: &csi.NodeGetVolumeStatsRequest{VolumeId: "other"}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEnv(t)
				open := make(chan struct{})
				e.answer = func(context.Context, driver.Passed) (bool, error) { <-open; return true, nil }
				var all sync.WaitGroup
				for i, s := range []step{c.first, c.second} {
					all.Go(func() {
						if err := e.run(t.Context(), s); err != nil {
							t.Error(err)
						}
					})
					synctest.Wait()
					want := i + 1
					if c.waits {
						want = 1
					}
					if len(e.sent) != want {
						t.Errorf("after call %d: sent %q", i+1, e.sent)
					}
				}
				close(open)
				all.Wait()
				if len(e.sent) != 2 {
					t.Errorf("sent %q", e.sent)
				}
			})
		})
	}
}

// If an instance dies before it answers a call, the call waits for the next instance and is made again there.
func TestCallIsRepeatedAtTheNextInstance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t)
		e.answer = func(context.Context, driver.Passed) (bool, error) {
			if len(e.sent) > 1 {
				return true, nil
			}
			e.setAbsent(true)
			time.AfterFunc(time.Minute, func() { e.setAbsent(false) })
			return false, lost()
		}
		if err := e.run(t.Context(), publish()); err != nil || len(e.sent) != 2 {
			t.Errorf("%v; sent %q", err, e.sent)
		}
	})
}

// After a roll, calls for a FUSE mount go to the instance that has made it. Other calls go to the new instance.
func TestCallsReachTheInstanceThatServesTheMount(t *testing.T) {
	for _, c := range []struct {
		fuse bool
		want []registry.AllocID
	}{
		{true, []registry.AllocID{"old", "new", "old", "new"}},
		{false, []registry.AllocID{"old", "new", "new", "new"}},
	} {
		e := newEnv(t)
		e.fuse, e.members = c.fuse, []registry.AllocID{"old"}
		unpublish := &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: target}
		for i, err := range []error{
			e.run(t.Context(), publish()),
			func() error {
				e.members = []registry.AllocID{"new", "old"}
				return e.call(t.Context(), "Node/NodeGetVolumeStats", &csi.NodeGetVolumeStatsRequest{VolumeId: "other"})
			}(),
			e.call(t.Context(), "Node/NodeUnpublishVolume", unpublish),
			e.call(t.Context(), "Node/NodeUnpublishVolume", unpublish),
		} {
			if err != nil {
				t.Errorf("call %d: %v", i, err)
			}
		}
		if !slices.Equal(e.sentTo, c.want) {
			t.Errorf("fuse %v: calls went to %q, want %q", c.fuse, e.sentTo, c.want)
		}
	}
}

// If a call has waited for another call for its volume, it goes to the instance that is active after the wait.
func TestCallChoosesItsInstanceOnceTheVolumeIsFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t)
		e.members = []registry.AllocID{"old"}
		open := make(chan struct{})
		e.answer = func(context.Context, driver.Passed) (bool, error) { <-open; return true, nil }
		var all sync.WaitGroup
		stage := &csi.NodeStageVolumeRequest{VolumeId: volume, StagingTargetPath: "/staging"}
		for _, s := range []step{{method: "Node/NodeStageVolume", request: stage}, publish()} {
			all.Go(func() {
				if err := e.run(t.Context(), s); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		e.members = []registry.AllocID{"new", "old"}
		close(open)
		all.Wait()
		if want := []registry.AllocID{"old", "new"}; !slices.Equal(e.sentTo, want) {
			t.Errorf("calls went to %q, want %q", e.sentTo, want)
		}
	})
}

// A call that waits for an instance does not hold up other operations on its volume.
func TestCallHoldsNoLockWhileItWaitsForAnInstance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t)
		e.setAbsent(true)
		done := make(chan error, 1)
		go func() { done <- e.run(t.Context(), publish()) }()
		synctest.Wait()
		if busy := e.Locks.Busy(key); busy != "" {
			t.Errorf("%s holds the lock of the volume", busy)
		}
		e.setAbsent(false)
		if err := <-done; err != nil || len(e.sent) != 1 {
			t.Errorf("%v; sent %q", err, e.sent)
		}
	})
}

// A call with one answer ends after callLimit. A stream of answers may take longer.
func TestStreamsOutliveTheLimitOfOneCall(t *testing.T) {
	for method, want := range map[string]codes.Code{
		"SnapshotMetadata/GetMetadataAllocated": codes.OK, "Identity/Probe": codes.DeadlineExceeded,
	} {
		synctest.Test(t, func(t *testing.T) {
			e := newEnv(t)
			e.answer = func(ctx context.Context, _ driver.Passed) (bool, error) {
				select {
				case <-time.After(2 * callLimit):
					return true, nil
				case <-ctx.Done():
					return false, ctx.Err()
				}
			}
			if code := status.Code(Status(e.call(t.Context(), method, &emptypb.Empty{}))); code != want {
				t.Errorf("%s: %s, want %s", method, code, want)
			}
		})
	}
}

// A plugin that still runs an earlier try of a call answers ABORTED. Only then is the call repeated until that try
// ends.
func TestRepeatedCallWaitsForItsEarlierTry(t *testing.T) {
	for _, repeated := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			e := newEnv(t)
			e.repeated = repeated
			e.answer = func(context.Context, driver.Passed) (bool, error) {
				if len(e.sent) > 3 {
					return true, nil
				}
				return true, &registry.CallError{Code: "ABORTED", Outcome: registry.OutcomeUncertain}
			}
			err := e.run(t.Context(), publish())
			if code := status.Code(Status(err)); repeated && (err != nil || len(e.sent) != 4) ||
				!repeated && (code != codes.Aborted || len(e.sent) != 1) {
				t.Errorf("repeated %v: %v, sent %q", repeated, err, e.sent)
			}
		})
	}
}

// For a list, ABORTED means an invalid token, and is always passed on.
func TestInvalidTokenIsPassedOn(t *testing.T) {
	for method, request := range map[string]proto.Message{
		"Controller/ListVolumes":   &csi.ListVolumesRequest{StartingToken: "x"},
		"Controller/ListSnapshots": &csi.ListSnapshotsRequest{StartingToken: "x", SourceVolumeId: volume},
	} {
		synctest.Test(t, func(t *testing.T) {
			e := newEnv(t)
			e.Since, e.repeated = time.Now(), true
			e.reply(&registry.CallError{Code: "ABORTED", Outcome: registry.OutcomeFailed})
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			err := e.call(ctx, method, request)
			if status.Code(Status(err)) != codes.Aborted || len(e.sent) != 1 {
				t.Errorf("%s: %v, sent %d times", method, err, len(e.sent))
			}
		})
	}
}

// The instance of a service's role serves it. If no task has the role, the call fails at once.
func TestServiceIsServedByItsRole(t *testing.T) {
	controller, node := registry.RoleController, registry.RoleNode
	for _, c := range []struct {
		tasks  []registry.Role
		method string
		sent   string
		code   codes.Code
	}{
		{[]registry.Role{controller, node}, "Identity/Probe", "Probe to csi-controller", codes.OK},
		{[]registry.Role{node}, "Identity/Probe", "Probe to csi-node", codes.OK},
		{[]registry.Role{controller, node}, "Node/NodeGetInfo", "NodeGetInfo to csi-node", codes.OK},
		{[]registry.Role{controller}, "Controller/ListVolumes", "ListVolumes to csi-controller", codes.OK},
		{[]registry.Role{controller}, "SnapshotMetadata/GetMetadataDelta", "GetMetadataDelta to csi-controller",
			codes.OK},
		{[]registry.Role{node}, "Controller/ListVolumes", "", codes.Unimplemented},
		{[]registry.Role{controller}, "Node/NodeGetInfo", "", codes.Unimplemented},
		{nil, "Node/NodeGetInfo", "", codes.Unavailable},
	} {
		e := newEnv(t)
		e.tasks = c.tasks
		err := e.call(t.Context(), c.method, &emptypb.Empty{})
		if code := status.Code(Status(err)); code != c.code || strings.Join(e.sent, ", ") != c.sent {
			t.Errorf("%s with %q: %v, sent %q", c.method, c.tasks, err, e.sent)
		}
	}
}

// Methods and fields that this build does not know are passed unchanged.
func TestUnknownMethodsAndFieldsPass(t *testing.T) {
	newer := raw(t, &csi.GetPluginInfoResponse{Name: "as field 1", VendorVersion: "as field 2"})
	for _, method := range []string{"Node/NodeInventedLater", "Invented/Later", "Identity/Probe"} {
		e := newEnv(t)
		var passed, replied proto.Message
		e.answer = func(_ context.Context, call driver.Passed) (bool, error) {
			passed = call.Message
			return true, nil
		}
		err := e.Endpoint.Pass(t.Context(), Request{Plugin: key.Plugin, Method: "/csi.v1." + method, Message: newer},
			func(m *emptypb.Empty) error {
				replied = m
				return nil
			})
		if err != nil || !proto.Equal(passed, newer) || !proto.Equal(replied, newer) {
			t.Errorf("%s: %v; passed %v, replied %v", method, err, passed, replied)
		}
	}
	e := newEnv(t)
	if err := e.call(t.Context(), "no method", newer); status.Code(Status(err)) != codes.Unimplemented {
		t.Error(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
