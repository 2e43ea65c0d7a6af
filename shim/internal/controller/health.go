package controller

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Health records the health of volumes as controller plugins report it.
type Health struct {
	intent.Calls
	driver    HealthDriver
	suspended *csi.Suspensions
	logger    hclog.Logger
	failures  csi.Failures
}

// HealthDriver makes the CSI calls of Health. They change nothing.
type HealthDriver interface {
	ListHealth(ctx context.Context, at registry.InstanceKey, token string) (csi.HealthPage, error)
	ControllerHealth(context.Context, registry.InstanceKey, csi.HealthRequest) (registry.Condition, error)
	// ListConditions and VolumeCondition ask a plugin of CSI up to 1.12.
	ListConditions(ctx context.Context, at registry.InstanceKey, token string) (csi.HealthPage, error)
	VolumeCondition(context.Context, registry.InstanceKey, csi.HealthRequest) (*registry.Condition, error)
}

// NewHealth returns a Health. suspended are the calls during which plugins died. If it is nil, none is recorded.
func NewHealth(calls intent.Calls, driver HealthDriver, suspended *csi.Suspensions, logger hclog.Logger) *Health {
	return &Health{Calls: calls, driver: driver, suspended: suspended, logger: logger}
}

// Times of Health.Run.
const (
	firstHealth = 2 * time.Second  // before the first round, because a new shim has other work first
	healthEvery = 5 * time.Minute  // pause between two rounds
	healthLimit = 10 * time.Second // bounds the call for one volume
	listLimit   = time.Minute      // bounds the calls for all pages
)

// Run asks the plugins that report the health of volumes, until ctx ends. It asks all plugins at once, each with one
// call at a time, and pauses after each round. If a call has no response, it asks the plugin again in the next round. A
// plugin that died during such a call is not asked again in that version (Suspensions).
func (h *Health) Run(ctx context.Context) error {
	for wait := firstHealth; ; wait = healthEvery {
		if !intent.Sleep(ctx, wait+time.Duration(rand.Int64N(int64(wait/4)))) {
			return context.Cause(ctx)
		}
		if err := h.check(ctx); err != nil && ctx.Err() == nil {
			return fmt.Errorf("load the volumes for the health check: %w", err)
		}
	}
}

// check is one round. It fails if the records cannot be read.
func (h *Health) check(ctx context.Context) error {
	plugins := map[registry.PluginID][]registry.Volume{}
	err := h.State.View(ctx, func(view registry.View) error {
		for _, v := range view.Volumes() {
			// One node that asks is enough.
			if v.State == registry.VolumeReady && !v.Ephemeral && h.Executes(view, v.ExecutedBy()) == nil {
				plugins[v.Plugin] = append(plugins[v.Plugin], v)
			}
		}
		return nil
	})
	var all sync.WaitGroup
	for id, volumes := range plugins {
		inst, found := h.Plugins.Find(registry.RoleController, id)
		if !found || inst.Health.State == registry.Unhealthy {
			continue
		}
		all.Go(func() {
			if err := h.ask(ctx, inst, volumes); err != nil && ctx.Err() == nil {
				h.logger.Warn("a plugin has not reported the health of its volumes", "plugin", id,
					"again_in", healthEvery.String(), "error", err)
				// A suspension that cannot be written stays in memory.
				_ = h.suspended.SuspendFailed(ctx, h.State, inst, err, h.Now())
			}
		})
	}
	all.Wait()
	return err
}

// healthRPC returns the call by which the plugin reports the health of volumes, or an empty string if it has none. A
// list is preferred, because it is one call for all volumes.
func healthRPC(in registry.Instance) registry.RPC {
	f := in.Fingerprint
	old := f.Has(registry.ListCondition)
	switch {
	case f.Has(registry.ListHealth):
		return registry.ListHealthRPC
	case f.Has(registry.ControllerHealth):
		return registry.ControllerHealthRPC
	case old && f.Has(registry.ListVolumes) && in.Options[registry.OptionListVolumes] != registry.OptionOff:
		return registry.ListVolumesRPC
	case old && f.Has(registry.GetVolume):
		return registry.GetVolumeRPC
	}
	return ""
}

// ask asks one plugin about its volumes. It fails at the first call without a response.
func (h *Health) ask(ctx context.Context, inst registry.Instance, volumes []registry.Volume) error {
	rpc := healthRPC(inst)
	if h.suspends(rpc, inst) {
		return nil
	}
	listed := map[registry.ExternalID]*registry.Condition{}
	for _, v := range volumes {
		listed[v.External] = nil
	}
	var err error
	switch rpc {
	case registry.ListHealthRPC:
		err = h.list(ctx, inst, h.driver.ListHealth, listed)
	case registry.ListVolumesRPC:
		err = h.list(ctx, inst, h.driver.ListConditions, listed)
	}
	if err != nil {
		return err
	}
	for _, v := range volumes {
		err := h.update(ctx, inst, rpc, v, listed[v.External])
		if registry.NoAnswer(err) || ctx.Err() != nil {
			return err
		}
		if h.failures.Record(v.VolumeKey(), err) {
			h.logger.Warn("the health of a volume is not known", "volume", v.VolumeName().String(),
				"again_in", healthEvery.String(), "error", err)
		}
	}
	return nil
}

// update records the health of one volume. rpc is what healthRPC returns for the plugin. listed is the volume's
// condition in the list that rpc returned; nil: the list lacks the volume, or rpc returns no list.
func (h *Health) update(
	ctx context.Context, inst registry.Instance, rpc registry.RPC, v registry.Volume, listed *registry.Condition,
) error {
	key, sick := v.VolumeKey(), v.Health.Controller.Abnormal
	switch {
	case listed != nil:
		return h.record(ctx, key, *listed, true)
	case rpc == "" && sick: // the plugin does not report the health of volumes any more
		return h.record(ctx, key, registry.Condition{}, false)
	case rpc == registry.ListHealthRPC && sick && !inst.Fingerprint.Has(registry.ControllerHealth):
		// The list leaves out healthy volumes.
		return h.record(ctx, key, registry.Condition{}, true)
	case rpc == registry.ListHealthRPC && sick && !h.suspends(registry.ControllerHealthRPC, inst):
		// The list may also miss sick volumes (CSI ControllerListVolumeHealth), so ask about this one.
		return h.askOne(ctx, inst, registry.ControllerHealthRPC, key)
	case rpc == registry.ControllerHealthRPC, rpc == registry.GetVolumeRPC:
		return h.askOne(ctx, inst, rpc, key)
	}
	return nil
}

// suspends reports whether the plugin died during the call, so that it is not made again.
func (h *Health) suspends(rpc registry.RPC, inst registry.Instance) bool {
	if rpc == "" {
		return false
	}
	why, _ := h.suspended.Reason(rpc, inst)
	return why != ""
}

// list reads all pages of a list, and enters the condition of each volume that conditions has as a key.
func (h *Health) list(
	ctx context.Context, inst registry.Instance,
	page func(context.Context, registry.InstanceKey, string) (csi.HealthPage, error),
	conditions map[registry.ExternalID]*registry.Condition,
) error {
	ctx, cancel := context.WithTimeout(ctx, listLimit)
	defer cancel()
	return csi.ReadPages(func(token string) (string, error) {
		if token == "" {
			for id := range conditions {
				conditions[id] = nil
			}
		}
		p, err := page(ctx, inst.InstanceKey, token)
		for id, c := range p.Volumes {
			if _, known := conditions[id]; known {
				conditions[id] = &c
			}
		}
		return p.Next, err
	})
}

// askOne asks about one volume and records the answer. If another operation needs the volume, askOne gives up.
func (h *Health) askOne(
	ctx context.Context, inst registry.Instance, rpc registry.RPC, key registry.VolumeKey,
) error {
	if !h.Locks.AwaitFree(ctx, key) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	asking, unlock, err := h.Locks.LockYielding(ctx, key, "a question about its health")
	if err != nil {
		return err
	}
	defer unlock()
	v, idle := registry.Volume{}, false
	err = h.State.View(ctx, func(view registry.View) error {
		_, open := registry.OpenIntent(view, key)
		v, idle = view.VolumeByKey(key)
		idle = idle && !open
		return nil
	})
	if err != nil || !idle {
		return err
	}
	secrets, err := h.Resolve(ctx, v.VolumeSpec)
	if err != nil {
		return err
	}
	c, err := h.send(asking, inst, rpc, v, secrets)
	switch {
	case err != nil && errors.Is(context.Cause(asking), intent.ErrYielded):
		return nil // the next round asks again
	case err != nil || c == nil:
		return err
	}
	return h.record(ctx, key, *c, true)
}

func (h *Health) send(
	ctx context.Context, inst registry.Instance, rpc registry.RPC, v registry.Volume,
	secrets map[string]registry.SecretValue,
) (*registry.Condition, error) {
	private := csi.Private{Secrets: secrets, MountFlags: v.MountFlags, Contexts: []map[string]string{v.Context}}
	r := csi.HealthRequest{
		VolumeID: v.External, Secrets: secrets, Private: func(context.Context) csi.Private { return private },
	}
	if rpc == registry.GetVolumeRPC {
		return h.driver.VolumeCondition(ctx, inst.InstanceKey, r)
	}
	c, err := h.driver.ControllerHealth(ctx, inst.InstanceKey, r)
	return &c, err
}

// record records the condition. If announce is set, it adds an event of a change.
func (h *Health) record(ctx context.Context, key registry.VolumeKey, c registry.Condition, announce bool) error {
	_, err := registry.Ensure(ctx, h.State, func(view registry.View) (registry.Change, error) {
		v, known := view.VolumeByKey(key)
		if !known {
			return registry.Change{}, nil
		}
		change := v.HealthChange(c, h.Now())
		if !announce {
			change.Events = nil
		}
		return change, nil
	})
	return err
}
