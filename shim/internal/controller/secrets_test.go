package controller

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"holdfast/registry"
)

// safe returns one secret after another, then fails.
type safe []registry.SecretValue

func (s *safe) Resolve(context.Context, map[string]registry.Secret) (map[string]registry.SecretValue, error) {
	if len(*s) == 0 {
		return nil, registry.Errorf(registry.ErrUnavailable, "the host answers no questions")
	}
	value := (*s)[0]
	*s = (*s)[1:]
	return map[string]registry.SecretValue{"token": value}, nil
}

// A refused secret may be replaced between two tries. If it cannot be resolved, the last value is used.
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
			t.Run(string(rpc)+" "+what, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d := open(t, of(registry.CreateDelete, registry.AttachDetach, registry.ControllerExpand,
						registry.ModifyVolume), c.records...)
					last := values[len(values)-1].Reveal()
					d.Controller = d.build(d.Plugins, &values)
					d.faults = []fault{failed("UNAUTHENTICATED")}
					if err := c.do(d.Controller, t.Context()); err != nil {
						t.Error(err)
					}
					if want := []string{string(rpc) + " canary-old", string(rpc) + " " +
						last}; !slices.Equal(d.plugin.secrets, want) {
						t.Errorf("secrets were sent with %q, want %q", d.plugin.secrets, want)
					}
				})
			})
		}
	}
}

// Without its secrets a call is not sent.
func TestFirstTryNeedsItsSecrets(t *testing.T) {
	d := open(t, of(registry.AttachDetach), ready(), claimed())
	d.Controller = d.build(d.Plugins, &safe{})
	if err := d.Controller.Attach(t.Context(), by, ready(), usage(), here("i-1")); !errors.Is(err,
		registry.ErrUnavailable) {
		t.Errorf("%v", err)
	}
	d.expect()
}
