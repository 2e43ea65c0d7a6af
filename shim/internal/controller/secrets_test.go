package controller

import (
	"context"
	"reflect"
	"slices"
	"testing"

	"holdfast/registry"
)

// safe resolves to one value after another, and then fails.
type safe []registry.SecretValue

func (s *safe) Resolve(context.Context, map[string]registry.Secret) (map[string]registry.SecretValue, error) {
	if len(*s) == 0 {
		return nil, registry.Errorf(registry.ErrUnavailable, "the host answers no questions")
	}
	value := (*s)[0]
	*s = (*s)[1:]
	return map[string]registry.SecretValue{"token": value}, nil
}

// A refused secret may be replaced between two tries. If the new one cannot be resolved, the last value is used.
func TestRotatedSecretIsUsedByTheNextControllerCall(t *testing.T) {
	placed := registry.Attachment{Volume: key, Name: name, Node: "n1", NodeID: "i-1", State: registry.MarkDone,
		Usage: usage()}
	for rpc, c := range map[registry.RPC]struct {
		records []registry.Record
		do      func(*Controller, context.Context) error
	}{
		registry.CreateVolumeRPC: {nil, func(m *Controller, ctx context.Context) error {
			_, err := m.Create(ctx, call, spec())
			return err
		}},
		registry.DeleteVolumeRPC: {[]registry.Record{ready()}, func(m *Controller, ctx context.Context) error {
			return m.Delete(ctx, call, name)
		}},
		registry.ControllerPublishRPC: {[]registry.Record{ready(), claimed()},
			func(m *Controller, ctx context.Context) error {
				return m.Attach(ctx, by, ready(), usage(), here("i-1"))
			}},
		registry.ControllerUnpublishRPC: {[]registry.Record{ready(), placed},
			func(m *Controller, ctx context.Context) error { return m.Detach(ctx, by, key, "n1") }},
		registry.ControllerExpandRPC: {[]registry.Record{ready()}, func(m *Controller, ctx context.Context) error {
			_, err := m.Expand(ctx, call, name, upTo(large, 0))
			return err
		}},
		registry.ControllerModifyRPC: {[]registry.Record{ready()}, func(m *Controller, ctx context.Context) error {
			_, err := m.Modify(ctx, call, name, map[string]string{"tier": "gold"})
			return err
		}},
	} {
		for what, values := range map[string]safe{"rotated": {"canary-old", "canary-new"},
			"nobody to be asked": {"canary-old"}} {
			runInBubble(t, string(rpc)+" "+what, func(t *testing.T) {
				d := open(t, of(registry.CreateDelete, registry.AttachDetach, registry.ControllerExpand,
					registry.ModifyVolume), c.records...)
				last := values[len(values)-1].Reveal()
				d.Controller = d.build(d.Plugins, &values)
				d.faults = []fault{failed("UNAUTHENTICATED")}
				noErr(t, "", c.do(d.Controller, t.Context()))
				if want := []string{string(rpc) + " canary-old", string(rpc) + " " +
					last}; !slices.Equal(d.plugin.secrets, want) {
					t.Errorf("secrets were sent with %q, want %q", d.plugin.secrets, want)
				}
			})
		}
	}
}

// If the secrets of a deletion cannot be read, the deletion does not begin. The error says how to continue or give up.
func TestDeletionWithoutSecretsHasAWayOut(t *testing.T) {
	deleting := ready()
	deleting.State = registry.VolumeDeleting
	unusable := ready()
	unusable.State, unusable.Failure = registry.VolumeUncertain, registry.Failure{Code: "OK"}
	snap := registry.VolumeSnapshot{
		SnapshotSpec: snapSpec, Plugin: key.Plugin, Source: key.External, External: "snap-1",
		State: registry.SnapshotReady,
	}
	snap.Secrets = ready().Secrets
	leaving := snap
	leaving.State = registry.SnapshotDeleting
	volume := func(d *snapshotDesk, ctx context.Context) error { return d.Controller.Delete(ctx, call, name) }
	snapshot := func(d *snapshotDesk, ctx context.Context) error { return d.Snapshots.Delete(ctx, call, snapName) }
	for what, c := range map[string]struct {
		record registry.Record
		delete func(*snapshotDesk, context.Context) error
		says   []string
	}{
		"a volume":                    {ready(), volume, []string{"`volume update`"}},
		"a volume that is uncertain":  {unusable, volume, []string{"`volume update`"}},
		"a volume that is deleting":   {deleting, volume, []string{"`volume update`", "`volume deregister` only"}},
		"a snapshot":                  {snap, snapshot, []string{"`volume update`", "`snapshot deregister` only"}},
		"a snapshot that is deleting": {leaving, snapshot, []string{"`volume update`", "`snapshot deregister` only"}},
	} {
		t.Run(what, func(t *testing.T) {
			d := openSnapshots(t, of(registry.CreateDelete, registry.CreateSnapshot))
			d.put(c.record)
			d.Controller = d.desk.build(d.desk.Controller.Plugins, &safe{})
			d.Snapshots = NewSnapshots(d.Controller, d.plugin)
			var was registry.Record
			d.view(func(v registry.View) { was = v.Get(c.record.Key()) })
			err := c.delete(d, t.Context())
			for _, text := range c.says {
				wantErr(t, "", err, nil, text)
			}
			d.view(func(v registry.View) {
				if now := v.Get(c.record.Key()); !reflect.DeepEqual(now, was) {
					t.Errorf("it was %+v and is %+v", was, now)
				}
			})
			if v, is := c.record.(registry.Volume); is { // as the error advises
				v.Secrets = map[string]registry.Secret{"token": {Env: "OTHER"}}
				noErr(t, "", errOf(d.Controller.Update(t.Context(), call, v.VolumeSpec, false)))
			}
			if what == "a snapshot that is deleting" {
				noErr(t, "", d.Snapshots.Deregister(t.Context(), call, snapName))
			}
			d.expect()
		})
	}
}

// Without its secrets a call is not sent.
func TestFirstTryNeedsItsSecrets(t *testing.T) {
	d := open(t, of(registry.AttachDetach), ready(), claimed())
	d.Controller = d.build(d.Plugins, &safe{})
	wantErr(t, "", d.Controller.Attach(t.Context(), by, ready(), usage(), here("i-1")), registry.ErrUnavailable, "")
	d.expect()
}
