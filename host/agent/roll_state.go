package agent

import "fmt"

// RollState is the state of a Roll.
type RollState string

const (
	RollStarting RollState = "starting" // new allocs are not healthy yet
	RollDraining RollState = "draining" // new allocs serve; old ones are kept until nothing needs them
	RollDone     RollState = "done"
	RollFailed   RollState = "failed" // the job keeps its version
)

// RollState returns the state of the job's roll, which must not be nil.
func (j *JobRecord) RollState() RollState {
	switch {
	case j.Roll.Failed != "":
		return RollFailed
	case j.Next != nil:
		return RollStarting
	case j.Roll.Ended.IsZero():
		return RollDraining
	}
	return RollDone
}

// RollAllocs returns the new allocs of the job's roll, and the replaced allocs that have not ended. If the roll has
// failed, its new allocs are in both lists.
func (a *Agent) RollAllocs(j *JobRecord) (begun, kept []*AllocRecord) {
	rolling := j.rollSlots()
	for _, r := range a.Allocs() {
		if r.Job != j.Job.ID || len(r.Plugins()) == 0 {
			continue
		}
		if r.Version == j.Roll.Version {
			begun = append(begun, r)
		}
		if j.isReplacedInRoll(r) || rolling[r.slot()] != "" && !r.State.Ended() && !j.isNewInRoll(r) {
			kept = append(kept, r)
		}
	}
	return begun, kept
}

// DescribeRoll returns the state of the job's roll for messages. The roll must not be nil.
func (a *Agent) DescribeRoll(j *JobRecord) string {
	text := string(j.RollState())
	if j.Roll.Failed != "" {
		return text + ": " + j.Roll.Failed
	}
	begun, kept := a.RollAllocs(j)
	list := kept
	if j.Next != nil {
		list = begun
	}
	for _, r := range list {
		text += fmt.Sprintf("; alloc %s is %s", short(r.ID), r.State)
		if why := r.Why(); why != "" {
			text += ": " + why
		}
	}
	return text
}
