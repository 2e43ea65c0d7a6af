package registry

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Every id is a type of its own, so that a volume's id cannot be handed in where an alloc's is meant. An id is data: it is
// checked once where it enters (Parse functions), hashed where a path is made of it (package hooks), never joined.
type (
	// PluginID is the id of a csi_plugin stanza: what people and volumes call a plugin by.
	PluginID string
	// AllocID is the orchestrator's name of one placement of a group. The host mints it; it is never used twice.
	AllocID string
	// TaskName is the name of a task within its group.
	TaskName string
	// Namespace separates volumes of the same id that belong to different people.
	Namespace string
	// VolumeID is a volume's id within its namespace: what people call it by.
	VolumeID string
	// ExternalID is a volume's id at its plugin (volume_id of the CSI spec; at most 128 bytes, no character rule).
	ExternalID string
	// NodeID is a node as its plugin calls it (NodeGetInfo.node_id; 1 to 256 bytes).
	NodeID string
	// NodeName is a node as the orchestrator calls it.
	NodeName string
	// RequestName is the label of a group's volume block: one alloc may ask for one volume under several names.
	RequestName string
	// OperationID is minted by the host for each mutating call, so that a replay joins the first and is answered alike.
	OperationID string
	// Role is what an instance does for its plugin. It is an open string: a later CSI may bring further ones.
	Role string
	// Generation numbers shim processes of one state directory; each transaction compares it, which fences older ones.
	Generation uint64
	// Seq orders everything: it is taken in the transaction of a change, numbers its events, and is the CreateIndex and
	// ModifyIndex of its records. Numbers increase and may have gaps.
	Seq uint64
)

const (
	RoleController Role = "csi-controller"
	RoleNode       Role = "csi-node"
)

// DefaultNamespace is the namespace of a volume that names none.
const DefaultNamespace Namespace = "default"

// MaxID bounds ids in bytes: the CSI spec's general limit for strings ("Size Limits").
const MaxID = 128

// ParsePluginID accepts 1 to 128 bytes of letters, digits, '.', '_', '-' that start with a letter or digit.
func ParsePluginID(s string) (PluginID, error) { return parseName[PluginID]("plugin id", s) }

// ParseAllocID accepts what ParsePluginID accepts, and so do ParseTaskName, ParseNamespace, ParseRole and ParseNodeName.
func ParseAllocID(s string) (AllocID, error)     { return parseName[AllocID]("alloc id", s) }
func ParseNamespace(s string) (Namespace, error) { return parseName[Namespace]("namespace", s) }
func ParseRole(s string) (Role, error)           { return parseName[Role]("role", s) }
func ParseNodeName(s string) (NodeName, error)   { return parseName[NodeName]("node name", s) }

// ParseTaskName accepts 1 to 128 bytes of printable text without '/', as task and request names are free text elsewhere.
func ParseTaskName(s string) (TaskName, error) { return parseLabel[TaskName]("task name", s) }
func ParseRequestName(s string) (RequestName, error) {
	return parseLabel[RequestName]("volume name", s)
}

// ParseVolumeID accepts 1 to 128 bytes of printable text without '/' and "..": many drivers join the ids that people
// choose into paths of their own, and several did so without a check.
func ParseVolumeID(s string) (VolumeID, error) { return parseLabel[VolumeID]("volume id", s) }

// ParseOperationID accepts 1 to 128 bytes of printable text.
func ParseOperationID(s string) (OperationID, error) {
	return parseLabel[OperationID]("operation id", s)
}

// ParseExternalID accepts what a plugin may call a volume: 1 to 128 bytes of UTF-8 without control characters, not
// starting with '/' and without a ".." element (CSI "Size Limits"; the spec has no character rule, people's disks do).
func ParseExternalID(s string) (ExternalID, error) {
	if err := checkText("external id", s, MaxID); err != nil {
		return "", err
	}
	if strings.HasPrefix(s, "/") || hasDotDot(s) {
		return "", Invalid("external id %q looks like a path that leaves its directory; give the id that the plugin returned", s)
	}
	return ExternalID(s), nil
}

// ParseNodeID accepts 1 to 256 bytes of UTF-8 without control characters (NodeGetInfo.node_id).
func ParseNodeID(s string) (NodeID, error) {
	if err := checkText("node id", s, 256); err != nil {
		return "", err
	}
	return NodeID(s), nil
}

func parseName[T ~string](what, s string) (T, error) {
	if err := checkText(what, s, MaxID); err != nil {
		return "", err
	}
	for i, r := range s {
		alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("._-", r)) {
			return "", Invalid("%s %q: %q is not allowed here; use letters, digits, '.', '_' and '-', a letter or digit first", what, s, r)
		}
	}
	return T(s), nil
}

func parseLabel[T ~string](what, s string) (T, error) {
	if err := checkText(what, s, MaxID); err != nil {
		return "", err
	}
	if strings.Contains(s, "/") || hasDotDot(s) {
		return "", Invalid("%s %q must not contain '/' or be \"..\"", what, s)
	}
	return T(s), nil
}

// checkText refuses the empty, the overlong, the undecodable and the unprintable.
func checkText(what, s string, limit int) error {
	switch {
	case s == "":
		return Invalid("%s is empty", what)
	case len(s) > limit:
		return Invalid("%s is %d bytes long; at most %d are allowed", what, len(s), limit)
	case !utf8.ValidString(s):
		return Invalid("%s %q is not valid UTF-8", what, s)
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return Invalid("%s %q contains the unprintable character %U", what, s, r)
		}
	}
	return nil
}

// hasDotDot says whether s has an element ".." under either kind of slash, or is "." as a whole.
func hasDotDot(s string) bool {
	for part := range strings.FieldsFuncSeq(s, func(r rune) bool { return r == '/' || r == '\\' }) {
		if part == ".." {
			return true
		}
	}
	return s == "."
}

// VolumeName is a volume for people: its namespace and id.
type VolumeName struct {
	Namespace Namespace `json:"namespace"`
	ID        VolumeID  `json:"id"`
}

func (n VolumeName) String() string {
	if n.Namespace == DefaultNamespace || n.Namespace == "" {
		return string(n.ID)
	}
	return fmt.Sprintf("%s/%s", n.Namespace, n.ID)
}

// VolumeKey is a volume for CSI: its plugin and its id there. Locks, placements, refs and staging paths key on it.
type VolumeKey struct {
	Plugin   PluginID   `json:"plugin"`
	External ExternalID `json:"external_id"`
}

func (k VolumeKey) String() string { return fmt.Sprintf("%s:%s", k.Plugin, k.External) }

// TaskKey is one task of one alloc. It keeps its directories and sockets over restarts.
type TaskKey struct {
	Alloc AllocID  `json:"alloc"`
	Task  TaskName `json:"task"`
}

func (k TaskKey) String() string { return fmt.Sprintf("%s/%s", k.Alloc, k.Task) }
