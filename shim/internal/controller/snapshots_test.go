package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// snapshotPlugin answers one call after another from a script. It repeats the last answer.
type snapshotPlugin struct {
	mu      sync.Mutex // guards journal, answers and secrets
	journal []string
	answers []scriptedAnswer
	secrets map[string]registry.SecretValue // of the last call
	pages   map[string]pageOfSnapshots      // by token
	expires int                             // how often a token expires
}

type scriptedAnswer struct {
	snapshot csi.Snapshot
	group    csi.GroupSnapshot
	blocks   []registry.Blocks
	err      error
	during   func() // runs before the answer
}

func (p *snapshotPlugin) next(ctx context.Context, format string, args ...any) scriptedAnswer {
	p.mu.Lock()
	p.journal = append(p.journal, fmt.Sprintf(format, args...))
	if len(p.answers) == 0 {
		p.mu.Unlock()
		<-ctx.Done() // the call hangs
		return noAnswer("CANCELLED")
	}
	defer p.mu.Unlock()
	a := p.answers[0]
	if len(p.answers) > 1 {
		p.answers = p.answers[1:]
	}
	if a.during != nil {
		a.during()
	}
	return a
}

func (p *snapshotPlugin) keep(secrets map[string]registry.SecretValue) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.secrets = secrets
}

// answer replaces the script.
func (p *snapshotPlugin) answer(answers ...scriptedAnswer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answers = answers
}

func (p *snapshotPlugin) CreateSnapshot(
	ctx context.Context, _ registry.InstanceKey, r csi.CreateSnapshotRequest,
) (csi.Snapshot, error) {
	p.keep(r.Secrets)
	a := p.next(ctx, "CreateSnapshot %s of %s with %v", r.Name, r.Volume, r.Parameters)
	return a.snapshot, a.err
}

func (p *snapshotPlugin) DeleteSnapshot(ctx context.Context, _ registry.InstanceKey, r csi.SnapshotRequest) error {
	p.keep(r.Secrets)
	return p.next(ctx, "DeleteSnapshot %s", r.Snapshot).err
}

func (p *snapshotPlugin) GetSnapshot(
	ctx context.Context, _ registry.InstanceKey, r csi.SnapshotRequest,
) (csi.Snapshot, error) {
	a := p.next(ctx, "GetSnapshot %s", r.Snapshot)
	return a.snapshot, a.err
}

func (p *snapshotPlugin) CreateGroupSnapshot(
	ctx context.Context, _ registry.InstanceKey, r csi.CreateSnapshotRequest,
) (csi.GroupSnapshot, error) {
	p.keep(r.Secrets)
	a := p.next(ctx, "CreateVolumeGroupSnapshot %s of %v with %v", r.Name, r.Volumes, r.Parameters)
	return a.group, a.err
}

func (p *snapshotPlugin) DeleteGroupSnapshot(ctx context.Context, _ registry.InstanceKey, r csi.SnapshotRequest) error {
	p.keep(r.Secrets)
	return p.next(ctx, "DeleteVolumeGroupSnapshot %s %v", r.Snapshot, r.Members).err
}

func (p *snapshotPlugin) GetGroupSnapshot(
	ctx context.Context, _ registry.InstanceKey, r csi.SnapshotRequest,
) (csi.GroupSnapshot, error) {
	a := p.next(ctx, "GetVolumeGroupSnapshot %s %v", r.Snapshot, r.Members)
	return a.group, a.err
}

func (p *snapshotPlugin) SnapshotBlocks(
	ctx context.Context, _ registry.InstanceKey, r csi.BlocksRequest, page func(registry.Blocks) error,
) error {
	a := p.next(ctx, "%s %s %s from %d", r.RPC(), r.Base, r.Snapshot, r.Offset)
	for _, part := range a.blocks {
		if err := page(part); err != nil {
			return err
		}
	}
	return a.err
}

func (p *snapshotPlugin) ListSnapshots(
	_ context.Context, _ registry.InstanceKey, _ registry.ExternalID, token string,
) ([]csi.Snapshot, string, error) {
	if token != "" && p.expires > 0 {
		p.expires--
		return nil, "", refused("ABORTED").err
	}
	page := p.pages[token]
	return page.list, page.next, nil
}

type pageOfSnapshots struct {
	list []csi.Snapshot
	next string
}

var (
	snapSpec = registry.SnapshotSpec{Namespace: "default", ID: "s1", Volume: "data",
		Parameters: map[string]string{"tier": "cold"}}
	snapName   = snapSpec.SnapshotName()
	snapReady  = csi.Snapshot{ID: "snap-1", Volume: key.External, Size: 1 << 30, Ready: true}
	processing = csi.Snapshot{ID: "snap-1", Volume: key.External, Size: 1 << 30}
)

// Answers that cannot be used, and an answer for a member of a group.
var (
	stranger = csi.Snapshot{ID: "snap-1", Volume: "vol-other", Ready: true}
	homeless = csi.Snapshot{ID: "snap-1", Ready: true}
	shrunk   = csi.Snapshot{ID: "snap-1", Volume: key.External, Size: -1, Ready: true}
	renamed  = csi.Snapshot{ID: "snap-2", Volume: key.External, Ready: true}
	grouped  = csi.Snapshot{ID: "snap-1", Volume: key.External, Ready: true, Group: "group-1"}
)

func answer(s csi.Snapshot) scriptedAnswer { return scriptedAnswer{snapshot: s} }

// refusal returns a failure of a call. A code of gRPC itself with the outcome failed means that the call was not sent.
func refusal(code string, outcome registry.Outcome) scriptedAnswer {
	return scriptedAnswer{err: &registry.CallError{RPC: registry.CreateSnapshotRPC, Code: code, Outcome: outcome,
		Kind: registry.ErrInternal, Detail: "injected"}}
}

func refused(code string) scriptedAnswer  { return refusal(code, registry.OutcomeFailed) }
func noAnswer(code string) scriptedAnswer { return refusal(code, registry.OutcomeUncertain) }

// snapshotDesk is a desk with Snapshots.
type snapshotDesk struct {
	*desk
	plugin *snapshotPlugin
	*Snapshots
}

func openSnapshots(t *testing.T, plugins table, answers ...scriptedAnswer) *snapshotDesk {
	d := &snapshotDesk{desk: open(t, plugins, ready()), plugin: &snapshotPlugin{answers: answers}}
	d.Snapshots = NewSnapshots(d.desk.Controller, d.plugin)
	return d
}

// restart replaces the process. Only durable state remains.
func (d *snapshotDesk) restart() {
	d.desk.crash()
	d.Snapshots = NewSnapshots(d.desk.Controller, d.plugin)
}

func (d *snapshotDesk) state() registry.VolumeSnapshot {
	snap, err := d.Snapshots.snapshot(context.Background(), nameOf(snapSpec))
	if err != nil && !errors.Is(err, registry.ErrNotFound) {
		d.desk.t.Error(err)
	}
	return snap
}

func (d *snapshotDesk) wantJournal(calls ...string) {
	d.desk.t.Helper()
	d.plugin.mu.Lock()
	defer d.plugin.mu.Unlock()
	if !slices.Equal(d.plugin.journal, calls) {
		d.desk.t.Errorf("calls %q, want %q", d.plugin.journal, calls)
	}
	d.plugin.journal = nil
}

const createCall = "CreateSnapshot s1 of vol-data with map[tier:cold]"

// A snapshot is created once its plugin says that it is ready. If an outcome is not certain, the same call finds it
// out.
func TestSnapshotIsCreatedOnceItIsReady(t *testing.T) {
	create := registry.CreateSnapshot
	for name, c := range map[string]struct {
		caps    []registry.Capability
		answers []scriptedAnswer
		state   registry.SnapshotState // "": no record
		calls   []string
		err     string
	}{
		"at once": {nil, []scriptedAnswer{answer(snapReady)}, registry.SnapshotReady, []string{createCall}, ""},
		"later": {nil, []scriptedAnswer{answer(processing), answer(processing), answer(snapReady)},
			registry.SnapshotReady, []string{createCall, createCall, createCall}, ""},
		"later, with GET_SNAPSHOT": {[]registry.Capability{registry.GetSnapshot},
			[]scriptedAnswer{answer(processing), answer(snapReady)}, registry.SnapshotReady,
			[]string{createCall, "GetSnapshot snap-1"}, ""},
		"after no answer": {nil, []scriptedAnswer{noAnswer("UNAVAILABLE"), answer(snapReady)}, registry.SnapshotReady,
			[]string{createCall, createCall}, ""},
		"refused": {nil, []scriptedAnswer{refused("INVALID_ARGUMENT")}, "", []string{createCall}, "INVALID_ARGUMENT"},
		"refused after no answer": {nil, []scriptedAnswer{noAnswer("UNAVAILABLE"), refused("INVALID_ARGUMENT")},
			registry.SnapshotFailed, []string{createCall, createCall}, "snapshot delete"},
		"not looked at after no answer": {nil, []scriptedAnswer{noAnswer("UNAVAILABLE"), refused("PERMISSION_DENIED")},
			registry.SnapshotCreating, []string{createCall, createCall}, "PERMISSION_DENIED"},
		"not sent at first": {nil, []scriptedAnswer{refused("UNAVAILABLE"), refused("INVALID_ARGUMENT")}, "",
			[]string{createCall, createCall}, "INVALID_ARGUMENT"},
		"of another volume": {nil, []scriptedAnswer{answer(stranger)}, registry.SnapshotFailed, []string{createCall},
			"vol-other"},
		"an error of a question": {[]registry.Capability{registry.GetSnapshot},
			[]scriptedAnswer{answer(processing), refused("INTERNAL"), answer(snapReady)}, registry.SnapshotReady,
			[]string{createCall, "GetSnapshot snap-1", "GetSnapshot snap-1"}, ""},
		"a refusal of a question": {
			nil, []scriptedAnswer{answer(processing), refused("UNAUTHENTICATED"), answer(snapReady)},
			registry.SnapshotReady, []string{createCall, createCall, createCall}, ""},
		"of another id than before": {nil, []scriptedAnswer{answer(processing), answer(renamed)},
			registry.SnapshotFailed, []string{createCall, createCall}, "snap-2"},
		"without an id": {nil, []scriptedAnswer{answer(csi.Snapshot{})}, registry.SnapshotFailed, []string{createCall},
			"external id"},
		"gone while it is processed": {[]registry.Capability{registry.GetSnapshot},
			[]scriptedAnswer{answer(processing), refused("NOT_FOUND")}, registry.SnapshotFailed,
			[]string{createCall, "GetSnapshot snap-1"}, "NOT_FOUND"},
		"an error that passes": {nil, []scriptedAnswer{noAnswer("INTERNAL")}, registry.SnapshotCreating,
			[]string{createCall, createCall, createCall}, "Holdfast repeats the call"},
	} {
		runInBubble(t, name, func(t *testing.T) {
			d := openSnapshots(t, of(append(c.caps, create)...), c.answers...)
			snap, err := d.Create(t.Context(), call, snapSpec)
			wantErr(t, "", err, nil, c.err)
			if d.state().State != c.state {
				t.Errorf("%+v, want %q", d.state(), c.state)
			}
			d.wantJournal(c.calls...)
			if c.state == registry.SnapshotReady {
				if snap.External != "snap-1" || snap.Size != 1<<30 || snap.Plugin != key.Plugin ||
					d.plugin.secrets["token"].Reveal() != canary {
					t.Errorf("%+v, secrets %v", snap, d.plugin.secrets)
				}
				if again, err := d.Create(t.Context(), call, snapSpec); err != nil || again.External != "snap-1" {
					t.Errorf("the same again: %+v, %v", again, err)
				}
				d.wantJournal()
			}
		})
	}
}

func TestSnapshotIsRefusedBeforeAnyCall(t *testing.T) {
	able := of(registry.CreateSnapshot)
	uncertain, inline := ready(), ready()
	uncertain.State = registry.VolumeUncertain
	inline.ID, inline.External, inline.Ephemeral = "inline", "vol-inline", true
	other := registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: "theirs", ID: "x", Name: "s1"},
		Plugin: key.Plugin, State: registry.SnapshotReady}
	changed := registry.VolumeSnapshot{SnapshotSpec: snapSpec, State: registry.SnapshotReady}
	changed.Parameters = nil
	leaving := registry.VolumeSnapshot{SnapshotSpec: snapSpec, State: registry.SnapshotDeleting}
	leaving.Name, leaving.Source = "s1", key.External
	for name, c := range map[string]struct {
		plugins table
		known   registry.Record
		kind    error
	}{
		"no capability":       {of(registry.CreateDelete), nil, registry.ErrUnsupported},
		"volume not ready":    {able, uncertain, registry.ErrConflict},
		"an inline volume":    {able, inline, registry.ErrUnsupported},
		"name taken":          {able, other, registry.ErrExists},
		"another snapshot":    {able, changed, registry.ErrExists},
		"one being deleted":   {able, leaving, registry.ErrConflict},
		"a volume is missing": {able, nil, registry.ErrNotFound},
	} {
		d := openSnapshots(t, c.plugins, answer(snapReady))
		if c.known != nil {
			d.put(c.known)
		}
		spec := snapSpec
		if v, is := c.known.(registry.Volume); is {
			spec.Volume = v.ID
		}
		if c.kind == registry.ErrNotFound {
			spec.Volume = "none"
		}
		wantErr(t, name, errOf(d.Create(t.Context(), call, spec)), c.kind, "")
		d.wantJournal()
	}
}

// If the shim releases the state during a short call, the answer is stored.
func TestAnswerDuringAReleaseIsStored(t *testing.T) {
	d := openSnapshots(t, of(registry.CreateSnapshot))
	ctx, release := context.WithCancelCause(t.Context())
	d.plugin.answers = []scriptedAnswer{{snapshot: snapReady, during: func() { release(intent.ErrReleased) }}}
	_, err := d.Create(ctx, call, snapSpec)
	if snap := d.state(); snap.State != registry.SnapshotReady {
		t.Errorf("%v; %+v", err, snap)
	}
}

// If a process dies while a call is under way, the record stays, and the next process makes the same call.
func TestSnapshotIsFinishedAfterADeath(t *testing.T) {
	for name, c := range map[string]struct {
		begin   func(*snapshotDesk, context.Context) error
		answers []scriptedAnswer // for the next process
		state   registry.SnapshotState
		call    string
	}{
		"creating": {func(d *snapshotDesk, ctx context.Context) error {
			return errOf(d.Create(ctx, call, snapSpec))
		}, []scriptedAnswer{answer(processing), answer(snapReady)}, registry.SnapshotReady, createCall},
		"creating, then refused": {func(d *snapshotDesk, ctx context.Context) error {
			return errOf(d.Create(ctx, call, snapSpec))
		}, []scriptedAnswer{refused("INVALID_ARGUMENT")}, registry.SnapshotFailed, createCall},
		"deleting": {func(d *snapshotDesk, ctx context.Context) error {
			d.plugin.answers = []scriptedAnswer{answer(snapReady)}
			if _, err := d.Create(ctx, call, snapSpec); err != nil {
				return err
			}
			d.plugin.answers = nil
			return d.Delete(ctx, call, snapName)
		}, []scriptedAnswer{{}}, "", "DeleteSnapshot snap-1"},
		"group creating": {func(d *snapshotDesk, ctx context.Context) error {
			return errOf(d.Create(ctx, call, groupSpec))
		}, []scriptedAnswer{groupAnswer(func(g *csi.GroupSnapshot) { g.Ready = false }), groupAnswer(nil)},
			registry.SnapshotReady, createGroup},
		"group deleting": {func(d *snapshotDesk, ctx context.Context) error {
			d.plugin.answers = []scriptedAnswer{groupAnswer(nil)}
			if _, err := d.Create(ctx, call, groupSpec); err != nil {
				return err
			}
			d.plugin.answers = nil
			return d.DeleteGroup(ctx, call, groupName)
		}, []scriptedAnswer{{}}, "", deleteGroup},
	} {
		runInBubble(t, name, func(t *testing.T) {
			d := openGroup(t, of(registry.CreateSnapshot, registry.GroupSnapshots))
			dying, die := context.WithCancel(t.Context())
			left := make(chan error)
			go func() { left <- c.begin(d, dying) }()
			synctest.Wait()
			was := d.plugin.journal[len(d.plugin.journal)-1]
			d.log.Fail(errors.New("the process is dead")) // from now on nothing is stored
			die()
			if err := <-left; err == nil {
				t.Error("the call succeeded")
			}
			d.log.Heal()
			d.restart()
			d.plugin.answers, d.plugin.journal = c.answers, nil
			ctx, stop := context.WithCancel(t.Context())
			ran := make(chan error)
			go func() { ran <- d.Snapshots.Run(ctx) }()
			time.Sleep(time.Minute)
			synctest.Wait()
			stop()
			<-ran
			state := cmp.Or(d.state().State, d.group().State)
			if state != c.state || d.plugin.journal[0] != c.call || was != c.call {
				t.Errorf("%q, %q after %q", state, d.plugin.journal, was)
			}
		})
	}
}

func TestSnapshotIsDeletedOnceItsCreationIsCertain(t *testing.T) {
	const deleteCall = "DeleteSnapshot snap-1"
	for name, c := range map[string]struct {
		created []scriptedAnswer
		answers []scriptedAnswer
		state   registry.SnapshotState
		calls   []string
		err     string
	}{
		"ready": {[]scriptedAnswer{answer(snapReady)}, []scriptedAnswer{{}}, "", []string{deleteCall}, ""},
		"is gone": {[]scriptedAnswer{answer(snapReady)}, []scriptedAnswer{refused("NOT_FOUND")},
			"", []string{deleteCall}, ""},
		"in use": {[]scriptedAnswer{answer(snapReady)}, []scriptedAnswer{refused("FAILED_PRECONDITION")},
			registry.SnapshotReady, []string{deleteCall}, "FAILED_PRECONDITION"},
		"refused": {[]scriptedAnswer{answer(snapReady)}, []scriptedAnswer{refused("PERMISSION_DENIED")},
			registry.SnapshotReady, []string{deleteCall}, "PERMISSION_DENIED"},
		"no answer at first": {[]scriptedAnswer{answer(snapReady)}, []scriptedAnswer{noAnswer("UNAVAILABLE"), {}}, "",
			[]string{deleteCall, deleteCall}, ""},
		"errors that pass": {[]scriptedAnswer{answer(snapReady)}, []scriptedAnswer{noAnswer("INTERNAL")},
			registry.SnapshotDeleting, []string{deleteCall, deleteCall, deleteCall}, "repeats the deletion"},
		"creation uncertain": {[]scriptedAnswer{noAnswer("INTERNAL")}, []scriptedAnswer{answer(processing), {}}, "",
			[]string{createCall, deleteCall}, ""},
		"refused after no answer": {[]scriptedAnswer{answer(snapReady)},
			[]scriptedAnswer{noAnswer("UNAVAILABLE"), refused("PERMISSION_DENIED")}, registry.SnapshotDeleting,
			[]string{deleteCall, deleteCall}, "PERMISSION_DENIED"},
		"not sent at first": {[]scriptedAnswer{answer(snapReady)}, []scriptedAnswer{refused("UNAVAILABLE"), {}}, "",
			[]string{deleteCall, deleteCall}, ""},
		"never ready, and in use": {[]scriptedAnswer{answer(processing), answer(renamed)},
			[]scriptedAnswer{refused("FAILED_PRECONDITION")}, registry.SnapshotFailed, []string{deleteCall},
			"FAILED_PRECONDITION"},
		"never named": {[]scriptedAnswer{answer(csi.Snapshot{})}, []scriptedAnswer{answer(csi.Snapshot{})},
			registry.SnapshotFailed, []string{createCall}, "has not named it"},
		"of another volume": {[]scriptedAnswer{answer(stranger)}, []scriptedAnswer{answer(stranger)},
			registry.SnapshotFailed, []string{createCall}, "has not named it"},
		"of no volume":    {[]scriptedAnswer{answer(homeless)}, []scriptedAnswer{{}}, "", []string{deleteCall}, ""},
		"of a wrong size": {[]scriptedAnswer{answer(shrunk)}, []scriptedAnswer{{}}, "", []string{deleteCall}, ""},
		"of a group":      {[]scriptedAnswer{answer(grouped)}, nil, registry.SnapshotReady, nil, "group snapshot"},
	} {
		runInBubble(t, name, func(t *testing.T) {
			d := openSnapshots(t, of(registry.CreateSnapshot), c.created...)
			_, _ = d.Create(t.Context(), call, snapSpec)
			d.plugin.answers, d.plugin.journal = c.answers, nil
			err := d.Delete(t.Context(), call, snapName)
			wantErr(t, "", err, nil, c.err)
			if d.state().State != c.state {
				t.Errorf("%+v, want %q", d.state(), c.state)
			}
			d.wantJournal(c.calls...)
		})
	}
	d := openSnapshots(t, of(registry.CreateSnapshot))
	wantErr(t, "an unknown snapshot", d.Delete(t.Context(), call, snapName), registry.ErrNotFound, "")
}

// If another record has the id of an unusable answer, the id is not kept, so the other snapshot is not deleted.
func TestSnapshotOfAnotherRecordIsNotDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openSnapshots(t, of(registry.CreateSnapshot), answer(snapReady))
		d.put(registry.VolumeSnapshot{
			SnapshotSpec: registry.SnapshotSpec{Namespace: "default", ID: "other", Name: "other", Volume: "data"},
			Plugin:       key.Plugin, Source: key.External, External: "snap-1", State: registry.SnapshotReady,
		})
		if _, err := d.Create(t.Context(), call, snapSpec); err == nil {
			t.Error("created")
		}
		err := d.Delete(t.Context(), call, snapName)
		wantErr(t, "", err, nil, "has not named it")
		d.wantJournal(createCall, createCall)
	})
}

// A volume is restored from a ready snapshot of its plugin. The volume is at least as large as the snapshot.
func TestVolumeIsRestoredFromASnapshot(t *testing.T) {
	taken := registry.VolumeSnapshot{SnapshotSpec: snapSpec, Plugin: key.Plugin, External: "snap-1", Size: 1 << 20,
		State: registry.SnapshotReady}
	with := func(change func(*registry.VolumeSnapshot)) registry.VolumeSnapshot {
		snap := taken
		change(&snap)
		return snap
	}
	for name, c := range map[string]struct {
		snapshot registry.VolumeSnapshot
		source   registry.ExternalID // the source in the CreateVolume request; "": no call
		kind     error
	}{
		"ready":       {taken, "snap-1", nil},
		"not of ours": {with(func(s *registry.VolumeSnapshot) { s.ID = "s2" }), "s1", nil},
		"being processed": {with(func(s *registry.VolumeSnapshot) { s.State = registry.SnapshotProcessing }), "",
			registry.ErrConflict},
		"of another plugin": {with(func(s *registry.VolumeSnapshot) { s.Plugin = "other" }), "", registry.ErrInvalid},
		"larger":            {with(func(s *registry.VolumeSnapshot) { s.Size = 1<<20 + 1 }), "", registry.ErrInvalid},
	} {
		d := open(t, of(registry.CreateDelete, registry.CreateSnapshot), c.snapshot)
		d.spoil = func(answer *csi.Created) { answer.Source = registry.Source{Snapshot: c.source} }
		restored := spec()
		restored.SnapshotID = "s1"
		_, err := d.Controller.Create(t.Context(), call, restored)
		if !errors.Is(err, c.kind) || (c.kind == nil) != (err == nil) || d.last.create.Source.Snapshot != c.source {
			t.Errorf("%s: %v, asked for %v", name, err, d.last.create.Source)
		}
	}
}

// A plugin's list is read to its end. A list without an end is an error.
func TestSnapshotsOfAPluginAreListedToTheirEnd(t *testing.T) {
	known := registry.VolumeSnapshot{SnapshotSpec: snapSpec, Plugin: key.Plugin, External: "snap-1"}
	pages := map[string]pageOfSnapshots{
		"": {[]csi.Snapshot{snapReady}, "2"}, "2": {[]csi.Snapshot{snapReady, {ID: "snap-9"}}, ""},
	}
	d := openSnapshots(t, of(registry.CreateSnapshot, registry.ListSnapshots))
	d.put(known)
	d.plugin.pages, d.plugin.expires = pages, 3
	list, err := d.ListAtPlugin(t.Context(), key.Plugin, "")
	if err != nil || len(list) != 2 || list[0].SnapshotName() != snapName || list[0].State != registry.SnapshotReady ||
		list[1].External != "snap-9" || list[1].ID != "" || list[1].State != registry.SnapshotProcessing {
		t.Errorf("%+v, %v", list, err)
	}
	d.plugin.expires = 4
	wantErr(t, "tokens that always expire", errOf(d.ListAtPlugin(t.Context(), key.Plugin, "")), nil, "ABORTED")
	pages["2"] = pageOfSnapshots{nil, "2"} // empty pages for ever
	wantErr(t, "a list without an end", errOf(d.ListAtPlugin(t.Context(), key.Plugin, "")),
		registry.ErrInternal, "")
	_, err = openSnapshots(t, of(registry.CreateSnapshot)).ListAtPlugin(t.Context(), key.Plugin, "")
	wantErr(t, "without LIST_SNAPSHOTS", err, registry.ErrUnsupported, "")
}

// If the secrets of a snapshot cannot be read, the snapshot is not taken, and its record does not hold up other
// operations.
func TestSnapshotWithoutItsSecretsLeavesNoRecord(t *testing.T) {
	d := openSnapshots(t, of(registry.CreateSnapshot), answer(snapReady))
	d.Snapshots = NewSnapshots(d.build(d.Plugins, &safe{}), d.plugin)
	_, err := d.Create(t.Context(), call, snapSpec)
	if !errors.Is(err, registry.ErrUnavailable) || d.state().State != "" {
		t.Errorf("%v, %+v", err, d.state())
	}
	d.wantJournal()
}

// If Run has sent a creation and got no answer, the record stays after a later refusal: Run's call may have taken the
// snapshot.
func TestSnapshotStaysIfRunHasSentItsCreation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openSnapshots(t, of(registry.CreateSnapshot), refused("INVALID_ARGUMENT"))
		unlock, err := d.Locks.Lock(t.Context(), key, "a test")
		noErr(t, "", err)
		created := make(chan error, 1)
		go func() { created <- errOf(d.Create(t.Context(), call, snapSpec)) }()
		synctest.Wait()
		sent := d.state()
		sent.Failure = registry.Failure{RPC: registry.CreateSnapshotRPC, Code: "UNAVAILABLE"}
		d.put(sent)
		unlock()
		if err := <-created; err == nil || d.state().State != registry.SnapshotFailed {
			t.Errorf("%v, %+v", err, d.state())
		}
		d.wantJournal(createCall)
	})
}

// A deletion is refused while the plugin's id of the snapshot is unknown.
func TestSnapshotWithoutAnIDIsNotDeleted(t *testing.T) {
	d := openSnapshots(t, of(registry.CreateSnapshot))
	d.put(registry.VolumeSnapshot{SnapshotSpec: snapSpec, State: registry.SnapshotFailed, Plugin: key.Plugin})
	ref := snapshotRef{nameOf(snapSpec), d.state().CreateIndex}
	if _, err := d.beginDeletion(t.Context(), ref); !errors.Is(err, registry.ErrConflict) ||
		d.state().State != registry.SnapshotFailed {
		t.Errorf("%v, %+v", err, d.state())
	}
}

// While one caller waits for a snapshot to become ready, another may delete it.
func TestSnapshotIsDeletedWhileItIsProcessed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openSnapshots(t, of(registry.CreateSnapshot), answer(processing))
		created := make(chan error)
		go func() { created <- errOf(d.Create(t.Context(), call, snapSpec)) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		d.plugin.answers = []scriptedAnswer{{}}
		noErr(t, "", d.Delete(t.Context(), registry.Call{ID: "op-2"}, snapName))
		if err := <-created; !errors.Is(err, registry.ErrNotFound) {
			t.Errorf("the creation ended with %v", err)
		}
	})
}

// If a deletion begins during a call, the answer of the call is not stored, and the creation does not succeed.
func TestDeletionBeginsDuringACall(t *testing.T) {
	d := openSnapshots(t, of(registry.CreateSnapshot), answer(processing))
	ready := answer(snapReady)
	ready.during = func() {
		deleting := d.state()
		deleting.Before, deleting.State = deleting.State, registry.SnapshotDeleting
		d.put(deleting)
	}
	d.plugin.answers = append(d.plugin.answers, ready)
	wantErr(t, "the creation", errOf(d.Create(t.Context(), call, snapSpec)), registry.ErrConflict, "")
	if now := d.state(); now.State != registry.SnapshotDeleting {
		t.Errorf("%+v", now)
	}
}

// A snapshot is not deleted while a volume is created from it. A volume is not deleted while a snapshot of it is taken,
// or processed: a plugin is asked whether the snapshot is ready by CreateSnapshot, which names the volume.
func TestSourcesAreKeptWhileTheyAreNeeded(t *testing.T) {
	restoring := ready()
	restoring.VolumeSpec.ID, restoring.External, restoring.State = "restored", "", registry.VolumeUncertain
	restoring.Name, restoring.Source = "restored", registry.Source{Snapshot: "snap-1"}
	taken := registry.VolumeSnapshot{
		SnapshotSpec: snapSpec, Plugin: key.Plugin, Source: key.External, External: "snap-1",
		State: registry.SnapshotReady,
	}
	d := openSnapshots(t, of(registry.CreateSnapshot, registry.CreateDelete))
	d.put(restoring, taken)
	wantErr(t, "the snapshot", d.Delete(t.Context(), call, snapName), registry.ErrConflict, "")
	for _, state := range []registry.SnapshotState{registry.SnapshotCreating, registry.SnapshotProcessing} {
		taken.State = state
		d.put(taken)
		wantErr(t, "the volume", d.desk.Controller.Delete(t.Context(), call, name), registry.ErrConflict, string(state))
	}
	if err := d.Deregister(t.Context(), call, snapName); err != nil || d.state().State != "" {
		t.Errorf("deregistered: %v, %+v", err, d.state())
	}
	restoring.Source = registry.Source{Volume: key.External}
	d.put(restoring)
	wantErr(t, "the source of a clone", d.desk.Controller.Delete(t.Context(), call, name), registry.ErrConflict,
		"restored is uncertain")
	discarded := ready()
	discarded.State, discarded.DeleteWith = registry.VolumeDeleting, "a1"
	d.put(discarded)
	_, err := d.desk.tryVolume(t.Context(), name, 0)
	wantErr(t, "the source of a clone, with its alloc", err, registry.ErrConflict, "restored is uncertain")
	d.wantJournal()
	d.desk.expect()
}

// slow is a vault whose first answer comes late, and is an error.
type slow struct {
	vault
	asked atomic.Bool
}

func (s *slow) Resolve(
	ctx context.Context, refs map[string]registry.Secret,
) (map[string]registry.SecretValue, error) {
	if s.asked.Swap(true) {
		return s.vault.Resolve(ctx, refs)
	}
	intent.Sleep(ctx, time.Minute)
	return nil, registry.Errorf(registry.ErrUnavailable, "the host answers no questions")
}

// A caller that cannot send its call keeps the record of a snapshot for which Run is sending it meanwhile.
func TestCallerForgetsNoSnapshotThatRunIsTaking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openSnapshots(t, of(registry.CreateSnapshot), answer(snapReady))
		d.plugin.answers[0].during = func() { time.Sleep(2 * time.Minute) }
		d.Snapshots.volumes = d.desk.build(d.desk.Plugins, &slow{})
		ctx, cancel := context.WithCancel(t.Context())
		ran := make(chan error)
		created := make(chan error)
		go func() { created <- errOf(d.Create(t.Context(), call, snapSpec)) }()
		synctest.Wait()
		go func() { ran <- d.Snapshots.Run(ctx) }()
		wantErr(t, "the caller", <-created, registry.ErrUnavailable, "")
		time.Sleep(3 * time.Minute)
		if now := d.state(); now.State != registry.SnapshotReady {
			t.Errorf("%+v", now)
		}
		cancel()
		<-ran
	})
}
