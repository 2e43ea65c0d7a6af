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
	Node       VolumeCondition `json:"node,omitzero"` // while the volume is mounted on this node
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

// HealthChange is the change that records what the volume's plugin says of it in the role. It is empty if that is
// known, and has an event if the volume became unhealthy, or healthy again.
func (v Volume) HealthChange(role Role, says VolumeCondition, now time.Time) Change {
	before := v.Health.Of(role)
	if !says.Abnormal {
		says = VolumeCondition{}
	}
	if before.Abnormal == says.Abnormal && before.Message == says.Message {
		return Change{}
	}
	told := Event{Role: role, Plugin: v.Plugin, Volume: v.VolumeName(), External: v.External, Detail: says.Message, At: now}
	var events []Event
	switch {
	case !before.Abnormal:
		says.Since, told.Kind = now, EventVolumeUnhealthy
		events = []Event{told}
	case !says.Abnormal:
		told.Kind = EventVolumeHealthy
		events = []Event{told}
	default:
		says.Since = before.Since
	}
	return Change{Put: []Record{v.withCondition(role, says)}, Events: events}
}

// WithoutCondition returns v without what its plugin said of its health in role. That is not known any more once
// nothing of v is mounted here (RoleNode), or once the plugin does not declare any more that it reports conditions.
func (v Volume) WithoutCondition(role Role) Volume { return v.withCondition(role, VolumeCondition{}) }

func (v Volume) withCondition(role Role, c VolumeCondition) Volume {
	if role == RoleController {
		v.Health.Controller = c
	} else {
		v.Health.Node = c
	}
	return v
}
