package csifake

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake/journal"
)

// Moment says when a rule acts.
type Moment string

const (
	Before Moment = "before" // before the call takes effect
	// Middle is in the middle of a call. In stage, unstage, publish and unpublish, only the first of two mounts or
	// unmounts is done then. In a stream, some messages are sent.
	Middle Moment = "middle"
	After  Moment = "after" // after the effect, before the answer
)

// Hang says how long a call hangs.
type Hang string

const (
	UntilCancelled Hang = "context" // until its caller gives up; the call then ends
	ForEver        Hang = "forever" // until the plugin ends
)

// Fuse is used instead of an RPC in rules for requests of the kernel to a FUSE mount. See MountFuse.
const Fuse = "fuse"

// Rule changes the handling of some calls. Its actions run in the order of the fields: delay, wait, hang, drop, crash,
// code. If several rules match a call at a moment, only the first acts.
type Rule struct {
	RPC    string `json:"rpc,omitempty"`    // empty or *: every RPC
	Volume string `json:"volume,omitempty"` // empty: every volume
	Nth    int    `json:"nth,omitempty"`    // the first matching call to act on, from 1; 0: the first
	Times  int    `json:"times,omitempty"`  // on how many matching calls to act; 0: all
	When   Moment `json:"when,omitempty"`   // empty: before

	Delay   Duration `json:"delay,omitempty"` // continues when the caller is gone, so the effect may come late
	Until   string   `json:"until,omitempty"` // wait until this file exists
	Hang    Hang     `json:"hang,omitempty"`
	Drop    bool     `json:"drop,omitempty"` // cut the connection of the caller, with all its calls
	Crash   bool     `json:"crash,omitempty"`
	Code    string   `json:"code,omitempty"` // name of a gRPC code, such as INTERNAL; CODE_99 is an undefined code
	Message string   `json:"message,omitempty"`

	// Condition is the condition of volumes or storage in the answer. It needs VOLUME_CONDITION, or the capability for
	// the call.
	Condition *Condition `json:"condition,omitempty"`

	// NotReady makes Probe answer ready=false, and CreateSnapshot and calls for group snapshots ready_to_use=false.
	NotReady    bool `json:"not_ready,omitempty"`
	Unconfirmed bool `json:"unconfirmed,omitempty"` // ValidateVolumeCapabilities confirms nothing
	// IgnoreSource makes CreateVolume ignore volume_content_source, like a plugin that does not know the field.
	IgnoreSource bool   `json:"ignore_source,omitempty"`
	BadUTF8      bool   `json:"bad_utf8,omitempty"` // the strings of the answer are invalid UTF-8
	Answer       Answer `json:"-"`                  // rewrites the answer

	gate *Gate
}

// Answer rewrites the answer of a call, right before it is sent, to simulate hostile plugins. Either reply or err is
// nil. The function must not change the request.
type Answer func(ctx context.Context, req, reply proto.Message, err error) (proto.Message, error)

// Duration is a time.Duration that is written as "150ms" in JSON.
type Duration time.Duration

func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	*d = Duration(v)
	return err
}

// ParseScript reads a JSON list of rules. Unknown fields, RPCs, codes and words are errors.
func ParseScript(b []byte) ([]Rule, error) {
	var rules []Rule
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&rules); err != nil {
		return nil, fmt.Errorf("csifake: script: %w", err)
	}
	for _, r := range rules {
		if err := r.check(); err != nil {
			return nil, err
		}
	}
	return rules, nil
}

// check returns an error if the rule is invalid.
func (r Rule) check() error {
	for _, wrong := range []string{r.wrongWhere(), r.wrongAction()} {
		if wrong != "" {
			return fmt.Errorf("csifake: script: rule for %q: %s", r.RPC, wrong)
		}
	}
	return nil
}

func (r Rule) everyRPC() bool { return r.RPC == "" || r.RPC == "*" }

func (r Rule) wrongWhere() string {
	switch {
	case !r.everyRPC() && r.RPC != Fuse && !known(r.RPC):
		return "no such RPC"
	case !slices.Contains([]Moment{"", Before, Middle, After}, r.When):
		return fmt.Sprintf("when is %q, not before, middle or after", r.When)
	case r.When == Middle && !r.everyRPC() && !hasMiddle(r.RPC):
		return "it has no middle"
	}
	return ""
}

func hasMiddle(rpc string) bool {
	switch rpc {
	case "NodeStageVolume", "NodeUnstageVolume", "NodePublishVolume", "NodeUnpublishVolume",
		"GetMetadataAllocated", "GetMetadataDelta":
		return true
	}
	return false
}

func (r Rule) wrongAction() string {
	_, code := journal.CodeNumber(r.Code)
	switch {
	case r.Code != "" && !code:
		return fmt.Sprintf("unknown code %q", r.Code)
	case r.Hang != "" && r.Hang != UntilCancelled && r.Hang != ForEver:
		return fmt.Sprintf("hang is %q, not context or forever", r.Hang)
	}
	return ""
}
