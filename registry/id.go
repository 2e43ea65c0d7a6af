package registry

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Each kind of ID has its own type, so the compiler tells a volume's ID from an alloc's. An ID is data: a Parse
// function checks it once where it enters, and package hooks hashes it into paths. It is never joined to a path.
type (
	// PluginID is the id of a csi_plugin stanza. Volumes and people name a plugin by it.
	PluginID string
	// AllocID is the orchestrator's name of one placement of a group. The host creates it and never reuses it. Nodes of
	// a cluster use different ones.
	AllocID string
	// TaskName is the name of a task within its group.
	TaskName string
	// Namespace separates volumes of the same ID.
	Namespace string
	// VolumeID is a volume's ID within its namespace. People name a volume by it.
	VolumeID string
	// ExternalID is a volume's id at its plugin (volume_id of the CSI spec). It is opaque: see ParseExternalID.
	ExternalID string
	// NodeID is the plugin's ID of a node (NodeGetInfo.node_id; 1 to 256 bytes).
	NodeID string
	// NodeName is the orchestrator's name of a node.
	NodeName string
	// RequestName is the label of a group's volume block: one alloc may ask for one volume under several names.
	RequestName string
	// OperationID identifies a mutating call. The host creates it. A replay joins the first call or gets its answer.
	OperationID string
	// Role is the CSI service that an instance provides. It is an open string: a later CSI may have more roles.
	Role string
	// Generation numbers the shim processes of one state directory. Each transaction compares it, which fences older
	// processes.
	Generation uint64
	// Seq orders all changes. A change takes it in its transaction. It numbers the events of the change and is the
	// CreateIndex and ModifyIndex of its records. Numbers increase and may have gaps.
	Seq uint64
)

// Revision is a point in the life of a state: the generation that owns it and the index of its last change.
type Revision struct {
	Generation Generation
	Index      Seq
}

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

// ParseAllocID accepts what ParsePluginID accepts, and so do ParseNamespace, ParseRole and ParseNodeName.
func ParseAllocID(s string) (AllocID, error)     { return parseName[AllocID]("alloc id", s) }
func ParseNamespace(s string) (Namespace, error) { return parseName[Namespace]("namespace", s) }
func ParseRole(s string) (Role, error)           { return parseName[Role]("role", s) }
func ParseNodeName(s string) (NodeName, error)   { return parseName[NodeName]("node name", s) }

// ParseTaskName accepts 1 to 128 bytes of printable text without '/', except "." and texts with an element "..". Other
// orchestrators allow free text as names of tasks and requests.
func ParseTaskName(s string) (TaskName, error) { return parseLabel[TaskName]("task name", s) }

// ParseLabel accepts the texts that ParseTaskName accepts. what names the text in errors.
func ParseLabel(what, s string) (string, error) { return parseLabel[string](what, s) }

// ParseVolumeID accepts what ParseTaskName accepts. Many drivers join the ID into paths of their own, some without a
// check.
func ParseVolumeID(s string) (VolumeID, error) { return parseLabel[VolumeID]("volume id", s) }

// ParseOperationID accepts what ParseTaskName accepts.
func ParseOperationID(s string) (OperationID, error) {
	return parseLabel[OperationID]("operation id", s)
}

// MaxExternalID bounds a plugin's ID of a volume or snapshot, in bytes. The CSI spec allows 128 for strings in general.
// Drivers that encode a path, a server or a resource group exceed that.
const MaxExternalID = 4096

// ParseExternalID accepts a plugin's ID of a volume or snapshot: 1 byte to 4 KiB of UTF-8. Any character is allowed, as
// the ID goes back to the plugin unchanged and is only hashed into paths.
func ParseExternalID(s string) (ExternalID, error) {
	if err := checkOpaque("external id", s, MaxExternalID); err != nil {
		return "", err
	}
	return ExternalID(s), nil
}

// shownID is the length in bytes up to which String shows the whole ID.
const shownID = 256

// String returns the ID for messages and logs. It omits the middle of a very long ID, so two IDs may look the same:
// never compare or store the text.
func (id ExternalID) String() string {
	if len(id) <= shownID {
		return string(id)
	}
	head := strings.ToValidUTF8(string(id[:shownID/2]), "")
	tail := strings.ToValidUTF8(string(id[len(id)-shownID/4:]), "")
	return fmt.Sprintf("%s... (%d bytes) ...%s", head, len(id), tail)
}

// ParseCreateName accepts a CreateVolumeRequest.name: 1 to 128 bytes of printable text. It refuses a path that leaves
// its directory, as drivers join the name into paths of their own.
func ParseCreateName(s string) (string, error) {
	if err := checkText("name", s); err != nil {
		return "", err
	}
	if strings.HasPrefix(s, "/") || hasDotDot(s) {
		return "", Invalid("name %q looks like a path that leaves its directory; choose another", s)
	}
	return s, nil
}

// maxNodeID is the limit of the CSI spec for this field, in bytes. Other orchestrators allow less.
const maxNodeID = 256

// ParseNodeID accepts 1 to 256 bytes of UTF-8 (NodeGetInfo.node_id).
func ParseNodeID(s string) (NodeID, error) {
	if err := checkOpaque("node id", s, maxNodeID); err != nil {
		return "", err
	}
	return NodeID(s), nil
}

func parseName[T ~string](what, s string) (T, error) {
	if err := checkText(what, s); err != nil {
		return "", err
	}
	for i, r := range s {
		alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("._-", r)) {
			return "", Invalid("%s %q: %q is not allowed here; "+
				"use letters, digits, '.', '_' and '-', a letter or digit first", what, s, r)
		}
	}
	return T(s), nil
}

func parseLabel[T ~string](what, s string) (T, error) {
	if err := checkText(what, s); err != nil {
		return "", err
	}
	if strings.Contains(s, "/") || hasDotDot(s) {
		return "", Invalid("%s %q must not contain '/' or be \".\" or \"..\"", what, s)
	}
	return T(s), nil
}

// checkOpaque returns an error if s is empty, longer than limit bytes, or not UTF-8.
func checkOpaque(what, s string, limit int) error {
	switch {
	case s == "":
		return Invalid("%s is empty", what)
	case len(s) > limit:
		return Invalid("%s is %d bytes long; at most %d are allowed", what, len(s), limit)
	case !utf8.ValidString(s):
		return Invalid("%s %.64q is not valid UTF-8", what, s)
	}
	return nil
}

// checkText returns an error if s is empty, longer than MaxID, or has characters that are not printable.
func checkText(what, s string) error {
	if err := checkOpaque(what, s, MaxID); err != nil {
		return err
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return Invalid("%s %q contains the unprintable character %U", what, s, r)
		}
	}
	return nil
}

// hasDotDot reports whether s is "." or has the element "..". Both / and \ separate elements.
func hasDotDot(s string) bool {
	for part := range strings.FieldsFuncSeq(s, func(r rune) bool { return r == '/' || r == '\\' }) {
		if part == ".." {
			return true
		}
	}
	return s == "."
}

// VolumeName is the name of a volume for people.
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

// VolumeKey identifies a volume for CSI: its plugin and the plugin's ID of it. Locks, attachments, stagings and refs
// key on it.
type VolumeKey struct {
	Plugin   PluginID   `json:"plugin"`
	External ExternalID `json:"external_id"`
}

func (k VolumeKey) String() string { return fmt.Sprintf("%s:%s", k.Plugin, k.External) }

// TaskKey identifies one task of one alloc. The task keeps its directories and sockets over restarts.
type TaskKey struct {
	Alloc AllocID  `json:"alloc"`
	Task  TaskName `json:"task"`
}

func (k TaskKey) String() string { return fmt.Sprintf("%s/%s", k.Alloc, k.Task) }
