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

// Moment is when a rule acts.
type Moment string

const (
	Before Moment = "before" // the call takes effect
	// of stage, unstage, publish and unpublish: something is mounted or unmounted, and not all is done; of a stream:
	// some messages were sent
	Middle Moment = "middle"
	After  Moment = "after" // the effect, and before the answer
)

// Hang is how long a call hangs.
type Hang string

const (
	UntilCancelled Hang = "context" // until its caller gives up; it then ends without going on
	ForEver        Hang = "forever" // until the plugin ends
)

// Fuse is what a rule may name instead of an RPC: requests of the kernel to a FUSE mount. See MountFuse.
const Fuse = "fuse"

// Rule changes what happens to some calls. Its actions happen in the order of the fields: delay, wait, hang, drop,
// crash, code. The first rule that matches a call at a moment is the one that acts.
type Rule struct {
	RPC    string `json:"rpc,omitempty"`    // empty or *: every one
	Volume string `json:"volume,omitempty"` // empty: every one
	Nth    int    `json:"nth,omitempty"`    // the first of the matching calls to act on, from 1; 0 is the first
	Times  int    `json:"times,omitempty"`  // on how many of them; 0 is all
	When   Moment `json:"when,omitempty"`   // empty: before

	Delay   Duration `json:"delay,omitempty"` // does not end with the caller: the effect may come late
	Until   string   `json:"until,omitempty"` // wait until this file exists
	Hang    Hang     `json:"hang,omitempty"`
	Drop    bool     `json:"drop,omitempty"` // cut the connection of the caller, with all its calls
	Crash   bool     `json:"crash,omitempty"`
	Code    string   `json:"code,omitempty"` // name of a gRPC code: INTERNAL; CODE_99 is one that nobody knows
	Message string   `json:"message,omitempty"`

	// of volumes or storage in the answer; needs VOLUME_CONDITION, or the capability for the call
	Condition *Condition `json:"condition,omitempty"`

	// Probe answers ready=false; CreateSnapshot and calls for group snapshots ready_to_use=false
	NotReady    bool `json:"not_ready,omitempty"`
	Unconfirmed bool `json:"unconfirmed,omitempty"` // ValidateVolumeCapabilities confirms nothing
	// CreateVolume ignores volume_content_source, as a plugin that does not know the field
	IgnoreSource bool   `json:"ignore_source,omitempty"`
	BadUTF8      bool   `json:"bad_utf8,omitempty"` // the strings of the answer are no UTF-8
	Answer       Answer `json:"-"`                  // rewrites the answer

	gate *Gate
}

// Answer rewrites what a call answers, as the last thing before the answer leaves: for hostile plugins. The reply is
// nil where err is not, and the other way round; the request must not be changed.
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

// check returns what is wrong with a rule.
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
