package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// enlarge drives ControllerExpandVolume to its end.
func (m *Mediator) enlarge(
	ctx context.Context, by intent.Caller, v registry.Volume, want registry.CapacityRange, w way, p intent.Policy,
) error {
	request := csi.ExpandRequest{
		VolumeID: v.External, Range: want, Private: csi.Private{MountFlags: v.MountFlags, Contexts: []map[string]string{v.Context, v.Parameters}},
	}
	var err error
	if request.Secrets, err = m.resolve(ctx, v.VolumeSpec); err != nil {
		return err
	}
	before := v.Expansion
	if request.Usage = before.Usage; !before.Open() {
		if request.Usage, err = m.usage(ctx, v); err != nil {
			return err
		}
	}
	vague := before.Open() // something may be made of the request that nobody knows of
	var answer csi.Expanded
	open := base(registry.ControllerExpandRPC, registry.Call{ID: by.ID}, v, intent.Hash(registry.ControllerExpandRPC, request))
	return m.drive(ctx, intent.Call{
		Intent: open, RetryUntil: by.RetryUntil, Policy: p,
		Before: func(view registry.View) (registry.Change, error) { return m.expanding(view, v, request, w) },
		Renew:  func(ctx context.Context) { request.Secrets = m.renewed(ctx, v.VolumeSpec, request.Secrets) },
		Do: func(ctx context.Context) error {
			inst, err := m.await(ctx, by, v.Plugin)
			if err != nil {
				return err
			}
			if answer, err = m.driver.Expand(ctx, inst.InstanceKey, request); err == nil {
				err = checkExpanded(answer, inst.InstanceKey, want)
			}
			if e, is := errors.AsType[*registry.CallError](err); is && intent.Answers(e.Code) && !intent.Silent(e.Code) {
				vague = intent.Vague(e.Code)
			}
			return err
		},
		Done: func(view registry.View) registry.Change { return m.expanded(view, v.VolumeName(), want, answer) },
		Failed: func(view registry.View, err *registry.CallError, clean bool) registry.Change {
			v, known := view.Volume(v.VolumeName())
			if !known {
				return registry.Change{}
			}
			switch {
			case err.Code == "OK":
				v.Expansion = before.Closed()
				v = m.resized(v, answer)
			case vague || !clean && intent.Silent(err.Code):
				v.Expansion = v.Expansion.Troubled(err)
			default:
				v.Expansion = before.Closed()
			}
			return registry.Change{Put: []registry.Record{v}}
		},
	})
}

// usage is that for which the volume is attached; else the one that it was made for; zero if there are several: a plugin that is told
// of the one could leave out what the others need.
func (m *Mediator) usage(ctx context.Context, v registry.Volume) (u registry.Usage, err error) {
	err = m.log.View(ctx, func(view registry.View) error {
		if p, _ := view.Placement(v.VolumeKey()); p.Attach != registry.MarkNone {
			u = p.Attached
		} else {
			u = usageOf(v.VolumeSpec)
		}
		return nil
	})
	return u, err
}

func usageOf(s registry.VolumeSpec) (u registry.Usage) {
	for _, c := range s.Capabilities {
		if c != s.Capabilities[0] {
			return registry.Usage{}
		}
	}
	if len(s.Capabilities) == 0 {
		return u
	}
	u = registry.Usage{Access: s.Capabilities[0].Access, Attachment: s.Capabilities[0].Attachment}
	if u.Attachment == registry.FileSystem {
		u.FSType, u.MountFlags, u.MountGroup = s.FSType, s.MountFlags, s.MountGroup
	}
	return u
}

// expanding records what is asked for, unless the volume is used and its plugin does not expand it then.
func (m *Mediator) expanding(view registry.View, v registry.Volume, r csi.ExpandRequest, w way) (registry.Change, error) {
	now, found := view.Volume(v.VolumeName())
	if !found {
		return registry.Change{}, unknown(v.VolumeName())
	}
	if err := offline(view, now, w); err != nil {
		return registry.Change{}, err
	}
	if !now.Expansion.Open() {
		now.Expansion.Since = m.Now()
	}
	now.Expansion.Asked, now.Expansion.Usage = r.Range, r.Usage
	return registry.Change{Put: []registry.Record{now}}, nil
}

// expanded is what the controller has made of the volume, and in the same commit what is left for its node.
func (m *Mediator) expanded(view registry.View, name registry.VolumeName, want registry.CapacityRange, answer csi.Expanded) registry.Change {
	v, known := view.Volume(name)
	if !known {
		return registry.Change{}
	}
	v.Expansion = v.Expansion.Closed().Retried()
	v.Expansion.Done = max(want.Required, v.Expansion.Done)
	v.Expansion.Node, v.Expansion.Since = registry.CapacityRange{}, time.Time{}
	v = m.resized(v, answer)
	told := fmt.Sprintf("%d bytes", v.Capacity)
	if answer.Node {
		told += "; its node is to see to it"
	}
	return registry.Change{Put: []registry.Record{v}, Events: []registry.Event{m.event(registry.EventVolumeExpanded, v, told)}}
}

// resized is v as its controller says that it is, with what it leaves to the node. That the volume cannot grow as it is mounted still stands.
func (m *Mediator) resized(v registry.Volume, answer csi.Expanded) registry.Volume {
	v.Capacity = max(v.Capacity, answer.Capacity)
	if answer.Node {
		v.Expansion = v.Expansion.Retried()
		v.Expansion.Node, v.Expansion.Since = registry.CapacityRange{Required: v.Capacity}, m.Now()
	}
	return v
}

// checkExpanded returns an error if the volume does not have the size that was asked for.
func checkExpanded(e csi.Expanded, at registry.InstanceKey, want registry.CapacityRange) error {
	switch {
	case e.Capacity < want.Required:
		return broken(registry.ControllerExpandRPC, at, registry.ErrInternal,
			"the plugin says that the volume has %d bytes; %d were asked for", e.Capacity, want.Required)
	case want.Limit > 0 && e.Capacity > want.Limit:
		return broken(registry.ControllerExpandRPC, at, registry.ErrInternal,
			"the plugin says that the volume has %d bytes; at most %d were asked for", e.Capacity, want.Limit)
	}
	return nil
}
