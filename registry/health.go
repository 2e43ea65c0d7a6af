package registry

import "time"

// VolumeCondition is what a plugin says of a volume's health in one of its roles. CSI has it as VolumeCondition up to
// version 1.12, and in later versions as the answer of ControllerGetVolumeHealth and NodeGetVolumeHealth.
type VolumeCondition struct {
	Abnormal bool      `json:"abnormal,omitempty"`
	Message  string    `json:"message,omitempty"` // the plugin's, redacted, for people; empty unless Abnormal
	Since    time.Time `json:"since,omitzero"`    // when it became abnormal
}

// VolumeHealth is what a volume's plugin said last of its health, by role. Only an abnormal condition is kept, so the
// zero value means that no plugin has said that the volume is unhealthy.
type VolumeHealth struct {
	Controller VolumeCondition `json:"controller,omitzero"`
	Node       VolumeCondition `json:"node,omitzero"` // in a status only: the record is Staging.Condition
}

// Of returns what the plugin said in the role.
func (h VolumeHealth) Of(role Role) VolumeCondition {
	if role == RoleController {
		return h.Controller
	}
	return h.Node
}

// Abnormal reports whether the plugin said in any role that the volume is unhealthy.
func (h VolumeHealth) Abnormal() bool { return h.Controller.Abnormal || h.Node.Abnormal }

// ConditionChange returns the condition to record after a plugin said of a volume what says holds, and the event of the
// change. told is that event, but for its kind and details. changed is false if says is recorded already.
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

// HealthChange is the change that records what the volume's controller plugin says of it. It is empty if that is known,
// and has an event if the volume became unhealthy, or healthy again.
func (v Volume) HealthChange(says VolumeCondition, now time.Time) Change {
	told := Event{Role: RoleController, Plugin: v.Plugin, Volume: v.VolumeName(), External: v.External, At: now}
	next, events, changed := ConditionChange(v.Health.Controller, says, told)
	if !changed {
		return Change{}
	}
	v.Health.Controller = next
	return Change{Put: []Record{v}, Events: events}
}

// WithoutCondition returns v without what its controller plugin said of its health. That is not known any more once the
// plugin does not declare any more that it reports conditions.
func (v Volume) WithoutCondition() Volume {
	v.Health.Controller = VolumeCondition{}
	return v
}
