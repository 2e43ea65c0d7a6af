package csifake

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake/journal"
)

// Moment is when a rule acts.
type Moment string

const (
	Before Moment = "before" // the call takes effect
	// of stage, unstage, publish and unpublish: something is mounted or unmounted, and not all is done
	Middle Moment = "middle"
	After  Moment = "after" // the effect, and before the answer
)

// Hang is how long a call hangs.
type Hang string

const (
	UntilCancelled Hang = "context" // until its caller gives up; it then ends without going on
	ForEver        Hang = "forever" // until the plugin ends
)

// What a rule may be about beside an RPC.
const (
	Accept = "accept" // a connection that is made to the socket: see Garbage
	Fuse   = "fuse"   // what the kernel asks of a FUSE mount of a volume: see MountFuse
)

// Rule changes what happens to some calls. Its actions happen in the order of the fields: delay, wait, hang, drop,
// crash, code. The first rule that matches a call at a moment is the one that acts.
type Rule struct {
	RPC    string `json:"rpc,omitempty"`    // empty or *: every one
	Volume string `json:"volume,omitempty"` // empty: every one
	Nth    int    `json:"nth,omitempty"`    // the first of the matching calls to act on, from 1; 0 is the first
	Times  int    `json:"times,omitempty"`  // on how many of them; 0 is all
	When   Moment `json:"when,omitempty"`   // empty: before

	Delay     Duration `json:"delay,omitempty"` // does not end with the caller: the effect may come late
	Until     string   `json:"until,omitempty"` // wait until this file exists
	Hang      Hang     `json:"hang,omitempty"`
	Drop      bool     `json:"drop,omitempty"` // cut the connection of the caller, with all its calls
	Crash     bool     `json:"crash,omitempty"`
	Code      string   `json:"code,omitempty"` // name of a gRPC code: INTERNAL; CODE_99 is one that nobody knows
	Message   string   `json:"message,omitempty"`
	TextBytes int      `json:"text_bytes,omitempty"` // with Code: the message is filled up to this length
	Details   bool     `json:"details,omitempty"`    // with Code: the status has binary details, which CSI forbids

	Pattern []string `json:"pattern,omitempty"` // what the calls get, one after the other and over again: see steps
	// with Pattern: a step is as long as this, from the first call on, not one call
	Every Duration `json:"every,omitempty"`
	// with Code or Drop, before: the effect comes all the same, so much later
	Late Duration `json:"late,omitempty"`
	Lie  Lie      `json:"lie,omitempty"` // it answers OK and has done something else

	// publish and unpublish answer OK, and the mount comes or goes so much later
	MountLate Duration `json:"mount_late,omitempty"`

	Condition *Condition `json:"condition,omitempty"` // of all volumes in the answer; needs VOLUME_CONDITION

	// Probe answers ready=false, CreateSnapshot ready_to_use=false
	NotReady bool `json:"not_ready,omitempty"`
	// the answer, as protobuf writes it in JSON, instead of the true one
	Reply   json.RawMessage `json:"reply,omitempty"`
	Hostile Hostile         `json:"hostile,omitempty"` // the true answer, spoilt
	Answer  Answer          `json:"-"`                 // rewrites the answer

	Garbage Garbage `json:"garbage,omitempty"` // what a connection gets instead of gRPC, for the RPC "accept"

	gate *Gate
	turn int // how often the rule has matched, this time included
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

// steps are what a pattern is made of, beside the names of codes.
var steps = map[string]func(*Rule){
	"ok":        func(*Rule) {},
	"not_ready": func(r *Rule) { r.NotReady = true },
	"error":     func(r *Rule) { r.Code, r.Message = "FAILED_PRECONDITION", "csifake: not healthy" },
	"hang":      func(r *Rule) { r.Hang = UntilCancelled },
}

// take is a rule as its pattern has it at one step.
func (r Rule) take(step string) Rule {
	if act := steps[step]; act != nil {
		act(&r)
	} else {
		r.Code = step
	}
	return r
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

// check says what is wrong with a rule.
func (r Rule) check() error {
	for _, wrong := range []string{r.wrongWhere(), r.wrongAction(), r.wrongPattern(), r.wrongAnswer()} {
		if wrong != "" {
			return fmt.Errorf("csifake: script: rule for %q: %s", r.RPC, wrong)
		}
	}
	return nil
}

func (r Rule) everyRPC() bool { return r.RPC == "" || r.RPC == "*" }

func (r Rule) wrongWhere() string {
	switch {
	case !r.everyRPC() && r.RPC != Accept && r.RPC != Fuse && !known(r.RPC):
		return "no such RPC"
	case !slices.Contains([]Moment{"", Before, Middle, After}, r.When):
		return fmt.Sprintf("when is %q, not before, middle or after", r.When)
	case r.When == Middle && !r.everyRPC() && !hasMiddle(r.RPC):
		return "it has no middle"
	case r.RPC == Accept && r.Garbage == "":
		return "it needs garbage"
	case r.Garbage != "" && r.RPC != Accept:
		return "garbage is for accept"
	case r.Garbage != "" && sow[r.Garbage] == nil:
		return fmt.Sprintf("unknown garbage %q", r.Garbage)
	}
	return ""
}

func hasMiddle(rpc string) bool {
	switch rpc {
	case "NodeStageVolume", "NodeUnstageVolume", "NodePublishVolume", "NodeUnpublishVolume":
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
	case r.Late != 0 && (r.Code == "" && !r.Drop || r.When != "" && r.When != Before):
		return "late goes with code or drop, before the effect"
	case r.Late != 0 && strings.HasPrefix(r.RPC, "GetMetadata"):
		return "a stream cannot be late"
	case r.Lie != "" && len(lies[r.Lie]) == 0:
		return fmt.Sprintf("unknown lie %q", r.Lie)
	case r.Lie != "" && !r.everyRPC() && !r.Lie.fits(r.RPC):
		return fmt.Sprintf("it does not lie %q", r.Lie)
	case r.MountLate != 0 && (!r.everyRPC() && r.RPC != "NodePublishVolume" && r.RPC != "NodeUnpublishVolume" ||
		r.When != "" && r.When != Before):
		return "mount_late goes with publish and unpublish, before the effect"
	case r.Lie != "" && r.When != "" && r.When != Before:
		return "a lie is told before the effect"
	}
	return ""
}

func (r Rule) wrongPattern() string {
	for _, step := range r.Pattern {
		if _, code := journal.CodeNumber(step); !code && steps[step] == nil {
			return fmt.Sprintf("unknown step %q in its pattern", step)
		}
	}
	if r.Every != 0 && len(r.Pattern) == 0 {
		return "every goes with a pattern"
	}
	return ""
}

func (r Rule) wrongAnswer() string {
	if r.Hostile != "" && hostilities[r.Hostile].spoil == nil {
		return fmt.Sprintf("unknown hostile answer %q", r.Hostile)
	}
	if r.Hostile != "" && !r.everyRPC() && !r.Hostile.Fits(r.RPC) {
		return fmt.Sprintf("it cannot answer %q", r.Hostile)
	}
	if len(r.Reply) == 0 {
		return ""
	}
	if _, err := r.reply(r.RPC); err != nil {
		return fmt.Sprintf("reply: %v", err)
	}
	return ""
}

// reply is the answer that the rule has instead of the true one.
func (r Rule) reply(rpc string) (proto.Message, error) {
	reply, err := newReply(rpc)
	if err != nil {
		return nil, err
	}
	return reply, protojson.Unmarshal(r.Reply, reply)
}
