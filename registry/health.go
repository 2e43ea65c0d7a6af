package registry

import "time"

// VolumeCondition is a volume's health as its plugin reports it in one role. CSI calls it VolumeCondition up to version
// 1.12. Later versions return it from ControllerGetVolumeHealth and NodeGetVolumeHealth.
type VolumeCondition struct {
	Abnormal bool      `json:"abnormal,omitempty"`
	Message  string    `json:"message,omitempty"` // the plugin's, redacted, for people; empty unless Abnormal
	Since    time.Time `json:"since,omitzero"`    // when it became abnormal
}

// VolumeHealth holds the last reported condition of a volume by role. It keeps only abnormal conditions, so the zero
// value means that no plugin reports the volume as unhealthy.
type VolumeHealth struct {
	Controller VolumeCondition `json:"controller,omitzero"`
	Node       VolumeCondition `json:"node,omitzero"` // in a status only: the record is Staging.Condition
}

// Of returns the condition that the plugin reported in the role.
func (h VolumeHealth) Of(role Role) VolumeCondition {
	if role == RoleController {
		return h.Controller
	}
	return h.Node
}

// Abnormal reports whether the plugin reports the volume as unhealthy in any role.
func (h VolumeHealth) Abnormal() bool { return h.Controller.Abnormal || h.Node.Abnormal }

// ConditionChange returns the condition to record after a plugin reported says, and the event of the change, which it
// makes of told by adding kind and details. changed is false if says is recorded already.
func ConditionChange(before, says VolumeCondition, told Event) (next VolumeCondition, events []Event, changed bool) {
	if !says.Abnormal {
		says = VolumeCondition{}
	}
	if before.Abnormal == says.Abnormal && before.Message == says.Message {
		return before, nil, false
	}
	told.Detail = says.Message
	switch {
	case !before.Abnormal:
		says.Since, told.Kind = told.At, EventVolumeUnhealthy
		events = []Event{told}
	case !says.Abnormal:
		told.Kind = EventVolumeHealthy
		events = []Event{told}
	default:
		says.Since = before.Since
	}
	return says, events, true
}

// HealthChange returns the change that records the condition that the controller plugin reports. It is empty if that is
// recorded already. It has an event if the volume became unhealthy, or healthy again.
func (v Volume) HealthChange(says VolumeCondition, now time.Time) Change {
	told := Event{Role: RoleController, Plugin: v.Plugin, Volume: v.VolumeName(), External: v.External, At: now}
	next, events, changed := ConditionChange(v.Health.Controller, says, told)
	if !changed {
		return Change{}
	}
	v.Health.Controller = next
	return Change{Put: []Record{v}, Events: events}
}

// WithoutCondition returns v without the condition of its controller plugin. The condition is unknown once the plugin
// no longer has the capability to report it.
func (v Volume) WithoutCondition() Volume {
	v.Health.Controller = VolumeCondition{}
	return v
}
