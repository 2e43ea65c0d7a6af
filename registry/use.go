package registry

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// Claim is an alloc's right to a volume under a usage. One alloc has at most one claim per request of a volume.
type Claim struct {
	Volume      VolumeKey   `json:"volume"`
	Name        VolumeName  `json:"name"` // for people
	Alloc       AllocID     `json:"alloc"`
	Request     RequestName `json:"request"`
	Node        NodeName    `json:"node"`
	Usage       Usage       `json:"usage"`
	CreateIndex Seq         `json:"create_index"`
	ModifyIndex Seq         `json:"modify_index"`
	Since       time.Time   `json:"since,omitzero"`
}

// ClaimKey names a claim, and the Ref that goes with it.
type ClaimKey struct {
	Volume  VolumeKey   `json:"volume"`
	Alloc   AllocID     `json:"alloc"`
	Request RequestName `json:"request"`
}

// ClaimKey returns the key of the claim.
func (c Claim) ClaimKey() ClaimKey { return ClaimKey{c.Volume, c.Alloc, c.Request} }

// Mark is the state of one step of the CSI life cycle (attach, stage, publish).
type Mark string

const (
	// MarkNone: never sent, or undone and confirmed. The zero value.
	MarkNone Mark = ""
	// MarkSent: the call, or its undo, was sent and may or may not have taken effect. It has to be sent again or
	// undone.
	MarkSent Mark = "sent"
	// MarkDone: confirmed by the plugin.
	MarkDone Mark = "done"
)

// Ref records one publish of a volume, so that its last user is known after a restart. A staged volume without refs is
// unstaged.
type Ref struct {
	Volume      VolumeKey   `json:"volume"`
	Alloc       AllocID     `json:"alloc"`
	Request     RequestName `json:"request"`
	Usage       Usage       `json:"usage"`
	Target      Tree        `json:"target"` // NodePublishVolume.target_path
	Publish     Mark        `json:"publish,omitempty"`
	Server      TaskKey     `json:"server,omitzero"` // the task that serves what is mounted there; see Staging
	Parts       []Part      `json:"parts,omitempty"` // of the volume, by their paths; none outlives the publish
	Boot        string      `json:"boot,omitempty"`
	Trouble     string      `json:"trouble,omitempty"` // what is wrong with a confirmed mount; empty: nothing
	Troubled    time.Time   `json:"troubled,omitzero"` // since when
	CreateIndex Seq         `json:"create_index"`
	ModifyIndex Seq         `json:"modify_index"`
}

// Part is a directory or file of a published volume that is mounted at another place, for a task with a sub_path. It is
// recorded before it is mounted, and removed from the record after it is unmounted.
type Part struct {
	Path string `json:"path"`           // in the volume
	At   string `json:"at"`             // on the host
	Mark Mark   `json:"mark,omitempty"` // sent: it may be mounted
}

// ClaimKey returns the key of the claim of the ref.
func (r Ref) ClaimKey() ClaimKey { return ClaimKey{r.Volume, r.Alloc, r.Request} }

// RPC is the name of a CSI call, as in csi.proto.
type RPC string

const (
	CreateVolumeRPC        RPC = "CreateVolume"
	DeleteVolumeRPC        RPC = "DeleteVolume"
	ControllerPublishRPC   RPC = "ControllerPublishVolume"
	ControllerUnpublishRPC RPC = "ControllerUnpublishVolume"
	NodeStageRPC           RPC = "NodeStageVolume"
	NodeUnstageRPC         RPC = "NodeUnstageVolume"
	NodePublishRPC         RPC = "NodePublishVolume"
	NodeUnpublishRPC       RPC = "NodeUnpublishVolume"
	ControllerExpandRPC    RPC = "ControllerExpandVolume"
	NodeExpandRPC          RPC = "NodeExpandVolume"
	ControllerModifyRPC    RPC = "ControllerModifyVolume"
	CreateSnapshotRPC      RPC = "CreateSnapshot"
	DeleteSnapshotRPC      RPC = "DeleteSnapshot"
	CreateGroupSnapshotRPC RPC = "CreateVolumeGroupSnapshot"
	DeleteGroupSnapshotRPC RPC = "DeleteVolumeGroupSnapshot"
)

// Alters reports whether the call changes the size or the parameters of a volume. Such a call has no undo.
func (r RPC) Alters() bool {
	return r == ControllerExpandRPC || r == NodeExpandRPC || r == ControllerModifyRPC
}

// OnNode reports whether the plugin's node service serves the call.
func (r RPC) OnNode() bool { return strings.HasPrefix(string(r), "Node") }

// Outcome of a CSI call.
type Outcome string

const (
	OutcomePending   Outcome = "pending"   // the intent is open and no answer has come yet
	OutcomeFailed    Outcome = "failed"    // answered with a code of a call that has ended; partial effects may remain
	OutcomeUncertain Outcome = "uncertain" // no answer, or a vague one: only the same call or its undo is legal
)

// Intent is written before a CSI call and closed after it. At most one is open per volume, of either bucket.
type Intent struct {
	Volume      VolumeKey   `json:"volume"` // CreateVolume: the plugin, and "name:" + a hash of the requested name
	Name        VolumeName  `json:"name"`   // for people
	RPC         RPC         `json:"rpc"`
	Alloc       AllocID     `json:"alloc,omitempty"`
	Request     RequestName `json:"request,omitempty"`
	Node        NodeID      `json:"node,omitempty"` // node_id of ControllerPublishVolume and its undo
	Operation   OperationID `json:"operation,omitempty"`
	At          TaskKey     `json:"at,omitzero"`       // the plugin's task that it was sent to; zero: not known
	Senders     []NodeName  `json:"senders,omitempty"` // nodes of a cluster at whose plugins it may run
	Hash        string      `json:"hash"`              // of the request without its secrets, hex
	Attempt     uint64      `json:"attempt"`
	Outcome     Outcome     `json:"outcome"`
	Code        string      `json:"code,omitempty"`   // last gRPC code, by name
	Detail      string      `json:"detail,omitempty"` // last error text, redacted
	Next        time.Time   `json:"next,omitzero"`    // when it is tried again, for people
	CreateIndex Seq         `json:"create_index"`
	ModifyIndex Seq         `json:"modify_index"`
	Since       time.Time   `json:"since,omitzero"`
}

// AllocState is the state of an alloc's volumes.
type AllocState string

const (
	AllocPreparing AllocState = "preparing"
	AllocReady     AllocState = "ready"
	AllocReleasing AllocState = "releasing"
)

// Alloc is an alloc with volumes. Sealed has its requests, as the host passed them.
type Alloc struct {
	ID          AllocID    `json:"id"`
	Job         string     `json:"job,omitempty"`
	Group       string     `json:"group,omitempty"`
	Namespace   Namespace  `json:"namespace"`
	Index       uint64     `json:"index"` // of the count, for per_alloc
	Node        NodeName   `json:"node,omitempty"`
	Sealed      []byte     `json:"sealed,omitempty"` // the group's part of Parse's answer
	State       AllocState `json:"state"`
	Waiting     []Wait     `json:"waiting,omitempty"` // at most one per request, in the order of the requests
	Release     Call       `json:"release,omitzero"`  // the call that releases the alloc, until it is answered
	Keep        bool       `json:"keep,omitempty"`    // its release deletes no volume: another alloc follows
	Forced      Forced     `json:"forced,omitzero"`   // its release skips plugins that are gone
	Lost        bool       `json:"lost,omitempty"`    // this node released it; the host has to call ReleaseAlloc
	CreateIndex Seq        `json:"create_index"`
	ModifyIndex Seq        `json:"modify_index"`
	Since       time.Time  `json:"since,omitzero"`
}

// TaskPhase is the phase of a task, as the host reported it.
type TaskPhase string

const (
	TaskStarting TaskPhase = "starting"
	TaskRunning  TaskPhase = "running"
	TaskStopping TaskPhase = "stopping" // is being ended on purpose: not watched any more
	TaskExited   TaskPhase = "exited"
)

// Task is a task that runs a CSI plugin.
type Task struct {
	TaskKey
	Job         string          `json:"job,omitempty"`
	Attempt     uint64          `json:"attempt"`
	Phase       TaskPhase       `json:"phase"`
	Isolated    bool            `json:"isolated"`           // has a file system of its own
	Sealed      []byte          `json:"sealed"`             // the task's part of Parse's answer
	Digest      string          `json:"digest"`             // SHA-256 of the job's text, hex
	Endpoint    Endpoint        `json:"endpoint,omitzero"`  // socket that the host passed to this attempt
	Volumes     Tree            `json:"volumes,omitzero"`   // staging root that the host passed to this attempt
	Plan        []byte          `json:"plan,omitempty"`     // plan that the host applies to this attempt, as JSON
	Started     BootTime        `json:"started"`            // when this attempt was started
	Restart     *RestartRequest `json:"restart,omitempty"`  // pending until a newer attempt is reported
	Withheld    bool            `json:"withheld,omitempty"` // a restart for its health waits until its FUSE mounts end
	Problem     string          `json:"problem,omitempty"`  // why the plugin is not registered yet
	CreateIndex Seq             `json:"create_index"`
	ModifyIndex Seq             `json:"modify_index"`
}

// RestartRequest asks the host to restart a task under its restart policy. It stands until a newer attempt is
// reported. The host acts on it once per attempt.
type RestartRequest struct {
	Attempt uint64    `json:"attempt"`
	Cause   Cause     `json:"cause"`
	Detail  string    `json:"detail,omitempty"`
	Since   time.Time `json:"since,omitzero"`
}

// BootTime is a time of CLOCK_BOOTTIME. Times of different boots cannot be compared.
type BootTime struct {
	Boot string        `json:"boot"` // /proc/sys/kernel/random/boot_id
	At   time.Duration `json:"at"`   // since boot
}

// Operation is a mutating call that was answered, or that has begun to remove a volume. A replay of an answered call
// gets the same answer.
type Operation struct {
	ID          OperationID `json:"id"`
	Method      string      `json:"method"`
	Digest      string      `json:"digest"`            // SHA-256 of the request, hex: no other request may have the ID
	Answer      []byte      `json:"answer"`            // the encoded answer; empty: the call has no answer yet
	Removes     Seq         `json:"removes,omitempty"` // CreateIndex of the volume that the call removes; 0: none
	CreateIndex Seq         `json:"create_index"`
}

// Call is a mutating call under way.
type Call struct {
	ID     OperationID `json:"id"`
	Method string      `json:"method"`
	Digest string      `json:"digest"` // SHA-256 of the request, hex
}

// Answered returns the record that gives a replay of the call the same answer, encoded as JSON. A call without an ID or
// a method has no such record: its ID is only for tracing.
func (c Call) Answered(answer any) []Record {
	if c.ID == "" || c.Method == "" {
		return nil
	}
	encoded, err := json.Marshal(answer)
	if err != nil {
		return nil // a replay then runs the call again, which is idempotent
	}
	return []Record{Operation{ID: c.ID, Method: c.Method, Digest: c.Digest, Answer: encoded}}
}

func (k ClaimKey) String() string {
	return fmt.Sprintf("%s for %s as %q", k.Volume, k.Alloc, k.Request)
}
