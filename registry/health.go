package registry

import "time"

// The calls by which plugins report health, and their capabilities. NodeStatsRPC and ListVolumesRPC report it too, with
// the capabilities of CSI up to 1.12.
const (
	ListHealthRPC       RPC = "ControllerListVolumeHealth"
	ControllerHealthRPC RPC = "ControllerGetVolumeHealth"
	NodeHealthRPC       RPC = "NodeGetVolumeHealth"
	StorageHealthRPC    RPC = "NodeGetStorageHealth"

	ListHealth       Capability = "controller.LIST_VOLUME_HEALTH"
	ControllerHealth Capability = "controller.GET_VOLUME_HEALTH"
	NodeHealth       Capability = "node.GET_VOLUME_HEALTH"
	StorageHealth    Capability = "node.GET_STORAGE_HEALTH"
	ListCondition    Capability = "controller.VOLUME_CONDITION" // CSI up to 1.12: ListVolumes, ControllerGetVolume
	NodeCondition    Capability = "node.VOLUME_CONDITION"       // CSI up to 1.12: NodeGetVolumeStats
)

// Condition is the health of a volume, or of the storage that a node reaches, as a plugin reports it in one role. CSI
// calls it VolumeCondition up to version 1.12, later VolumeHealth and StorageBackendHealth.
type Condition struct {
	Abnormal bool `json:"abnormal,omitempty"`
	// Reason lists the statuses and reasons of CSI 1.13, sorted, as in "DATA_LOSS/DiskFailed, DEGRADED/PathLost". It is
	// empty if the plugin speaks CSI 1.12 or earlier, or if Abnormal is false.
	Reason  string    `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"` // the plugin's, redacted, for people; empty unless Abnormal
	Since   time.Time `json:"since,omitzero"`    // when it became abnormal
}

// Text returns reason and message, for people.
func (c Condition) Text() string {
	if c.Reason == "" || c.Message == "" {
		return c.Reason + c.Message
	}
	return c.Reason + ": " + c.Message
}

// VolumeHealth holds the last reported condition of a volume by role. It keeps only abnormal conditions, so the zero
// value means that no plugin reports the volume as unhealthy.
type VolumeHealth struct {
	Controller Condition `json:"controller,omitzero"`
	Node       Condition `json:"node,omitzero"` // in a status only: the record is Staging.Condition
}

// Of returns the condition that the plugin reported in the role.
func (h VolumeHealth) Of(role Role) Condition {
	if role == RoleController {
		return h.Controller
	}
	return h.Node
}

// Abnormal reports whether the plugin reports the volume as unhealthy in any role.
func (h VolumeHealth) Abnormal() bool { return h.Controller.Abnormal || h.Node.Abnormal }

// ConditionChange returns the condition to record after a plugin reported one, and the event of the change. The event
// is e with the kind abnormal or normal, and with the text of the condition. If only the message has changed, there is
// no event. changed is false if the report is recorded already.
func ConditionChange(
	recorded, reported Condition, e Event, abnormal, normal EventKind,
) (next Condition, events []Event, changed bool) {
	if !reported.Abnormal {
		if !recorded.Abnormal {
			return recorded, nil, false
		}
		e.Kind, e.Detail = normal, ""
		return Condition{}, []Event{e}, true
	}
	next = reported
	if next.Since = e.At; recorded.Abnormal {
		next.Since = recorded.Since
	}
	if next == recorded {
		return recorded, nil, false
	}
	if recorded.Abnormal && recorded.Reason == next.Reason {
		return next, nil, true // only the message differs
	}
	e.Kind, e.Detail = abnormal, next.Text()
	return next, []Event{e}, true
}

// HealthChange returns the change that records the condition that the controller plugin reports. It is empty if that is
// recorded already.
func (v Volume) HealthChange(reported Condition, now time.Time) Change {
	e := Event{Role: RoleController, Plugin: v.Plugin, Volume: v.VolumeName(), External: v.External, At: now}
	next, events, changed := ConditionChange(v.Health.Controller, reported, e, EventVolumeUnhealthy, EventVolumeHealthy)
	if !changed {
		return Change{}
	}
	v.Health.Controller = next
	return Change{Put: []Record{v}, Events: events}
}

// StorageChange returns the change that records the condition of a node's storage in instances, the node instances of
// one plugin on one node. One event is for all of them. The change is empty if the condition is recorded already.
func StorageChange(instances []Instance, reported Condition, now time.Time) (c Change) {
	for _, in := range instances {
		e := Event{Role: in.Role, Plugin: in.Plugin, Alloc: in.Alloc, Task: in.Task, At: now}
		next, events, changed := ConditionChange(in.Storage, reported, e, EventStorageUnhealthy, EventStorageHealthy)
		if !changed {
			continue
		}
		in.Storage = next
		c.Put = append(c.Put, in)
		if len(c.Events) == 0 {
			c.Events = events
		}
	}
	return c
}
