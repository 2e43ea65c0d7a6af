package main

import (
	"crypto/sha256"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// mode is the widest use of a volume on its node.
type mode string

// The modes, from narrow to wide.
const (
	readerMode      mode = "reader"       // published once, read-only
	writerMode      mode = "writer"       // published once
	multiWriterMode mode = "multi-writer" // published any number of times
)

// includes reports whether a volume that was made or staged for m can be used as n.
func (m mode) includes(n mode) bool { return n == m || n == readerMode || m == multiWriterMode }

// usage is how a volume is staged. It is compared by value.
type usage struct {
	Mode  mode       `json:"mode"`
	Block bool       `json:"block,omitempty"` // a block device; else a file system
	Flags mountFlags `json:"mount_flags,omitempty"`
}

// fits reports whether a volume that was made or staged for u can be used as v.
func (u usage) fits(v usage) bool { return u.Mode.includes(v.Mode) && u.Block == v.Block }

func (u usage) String() string { return fmt.Sprintf("mode %s, block device %t", u.Mode, u.Block) }

// record is the record of a volume, a snapshot or a group of snapshots. It says what was requested; the mount table
// says what is mounted.
type record struct {
	ID        volumeID   `json:"id"`
	Backend   string     `json:"backend,omitempty"`
	Bytes     int64      `json:"bytes"`
	Usage     usage      `json:"usage,omitzero"`       // what it was made for
	ReadAhead int64      `json:"read_ahead,omitempty"` // KiB, of its devices; 0: that of the kernel
	Source    volumeID   `json:"source,omitempty"`     // what it was copied from
	Created   time.Time  `json:"created,omitzero"`     // of a snapshot or group
	Members   []volumeID `json:"members,omitempty"`    // of a group: its snapshots
	Stage     *stage     `json:"stage,omitempty"`
}

// stage is a requested stage. It is saved before the mount, and removed after the unmount.
type stage struct {
	Path  string `json:"path"`
	Usage usage  `json:"usage"`
	// Published has the target paths, and whether they are read-only. One is saved before its mount, and removed after
	// the unmount.
	Published map[string]bool `json:"published,omitempty"`
}

// stagedReadOnly reports whether the volume is staged for reading only.
func (r record) stagedReadOnly() bool { return r.Stage != nil && r.Stage.flags()&readOnlyFlag != 0 }

// flags returns the flags of the staging mount.
func (s *stage) flags() mountFlags {
	if s.Usage.Mode == readerMode {
		return s.Usage.Flags | readOnlyFlag
	}
	return s.Usage.Flags
}

// volumeID is the ID of a volume, a snapshot or a group: a kind and a hash of the name, so it is safe as a file name.
// The ID of a snapshot in a group has the hash of the group and that of the source volume.
type volumeID string

// kind is the first part of an ID.
type kind string

const (
	volumeKind   kind = "vol"   // made by CreateVolume
	snapshotKind kind = "snap"  // made by CreateSnapshot, or as part of a group
	groupKind    kind = "group" // made by CreateVolumeGroupSnapshot
)

var madeHere = regexp.MustCompile(`^(vol|snap|group)-([0-9a-f]{32})(-[0-9a-f]{32})?$`)

// idFor returns the ID for a name. The same name has the same ID, which makes creation idempotent.
func idFor(k kind, name string) volumeID {
	sum := sha256.Sum256([]byte(name))
	return volumeID(fmt.Sprintf("%s-%x", k, sum[:16]))
}

// memberID returns the ID of a snapshot in a group.
func memberID(group, source volumeID) volumeID {
	_, g, _ := strings.Cut(string(group), "-")
	_, s, _ := strings.Cut(string(source), "-")
	return volumeID(string(snapshotKind) + "-" + g + "-" + s)
}

func (id volumeID) kind() kind {
	k, _, _ := strings.Cut(string(id), "-")
	return kind(k)
}

// group returns the group of a snapshot, or an empty ID if it is in none.
func (id volumeID) group() volumeID {
	if m := madeHere.FindStringSubmatch(string(id)); m != nil && m[3] != "" {
		return volumeID(string(groupKind) + "-" + m[2])
	}
	return ""
}

// valid reports whether loopfs makes such IDs.
func (id volumeID) valid() bool { return madeHere.MatchString(string(id)) }

// parseID checks an ID of that kind from a request. The error is INVALID_ARGUMENT if no ID may look like that, and
// NOT_FOUND if loopfs makes no such ID.
func parseID(k kind, s string) (volumeID, error) {
	if err := checkID(string(k)+" id", s, 128); err != nil {
		return "", err
	}
	if id := volumeID(s); id.valid() && id.kind() == k {
		return id, nil
	}
	return "", status.Errorf(codes.NotFound, "%s %q was not made by loopfs", k, s)
}

// checkText refuses an empty or long string, and one with control characters that CSI bans in names.
func checkText(what, s string, limit int) error {
	banned := func(r rune) bool { return unicode.IsControl(r) && !strings.ContainsRune("\t\n\r", r) }
	switch {
	case s == "":
		return status.Errorf(codes.InvalidArgument, "%s is missing", what)
	case len(s) > limit:
		return status.Errorf(codes.InvalidArgument, "%s has %d bytes, at most %d are allowed", what, len(s), limit)
	case !utf8.ValidString(s) || strings.ContainsFunc(s, banned):
		return status.Errorf(codes.InvalidArgument, "%s holds control characters or is not UTF-8", what)
	}
	return nil
}

// checkID refuses what checkText refuses, and what looks like a path.
func checkID(what, s string, limit int) error {
	err := checkText(what, s, limit)
	if err == nil && (strings.ContainsAny(s, "/\\\t\n\r") || s == "." || s == "..") {
		err = status.Errorf(codes.InvalidArgument, "%s %q looks like a path, or has control characters", what, s)
	}
	return err
}

// checkName checks the name of a new volume, snapshot or group. It may look like a path, as only its hash is used.
func checkName(name string) error { return checkText("name", name, 128) }

// modes maps the supported access modes, those of one node.
var modes = map[csi.VolumeCapability_AccessMode_Mode]mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:   readerMode,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        writerMode,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: writerMode,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  multiWriterMode,
}

// readUsage parses a volume capability.
func readUsage(c *csi.VolumeCapability) (usage, error) {
	mode, ok := modes[c.GetAccessMode().GetMode()]
	m := c.GetMount()
	switch {
	case c == nil:
		return usage{}, status.Error(codes.InvalidArgument, "the volume capability is missing")
	case !ok:
		return usage{}, status.Errorf(codes.InvalidArgument, "access mode %s is not supported: loopfs volumes are "+
			"used on one node", c.GetAccessMode().GetMode())
	case c.GetBlock() != nil:
		return usage{Mode: mode, Block: true}, nil
	case m == nil:
		return usage{}, status.Error(codes.InvalidArgument, "the volume capability has no access type: mount or block")
	case m.GetFsType() != "" && m.GetFsType() != "ext4":
		return usage{}, status.Errorf(codes.InvalidArgument, "file system %.16q is not supported, only ext4",
			m.GetFsType())
	case m.GetVolumeMountGroup() != "":
		return usage{}, status.Error(codes.InvalidArgument,
			"loopfs lacks VOLUME_MOUNT_GROUP; leave out volume_mount_group")
	}
	flags, err := parseFlags(m.GetMountFlags())
	return usage{Mode: mode, Flags: flags}, err
}

// readAll parses the capabilities of a new volume and returns a usage that serves all of them.
func readAll(list []*csi.VolumeCapability) (sum usage, err error) {
	if len(list) == 0 {
		return sum, status.Error(codes.InvalidArgument, "the volume capabilities are missing")
	}
	for i, c := range list {
		u, err := readUsage(c)
		switch {
		case err != nil:
			return sum, err
		case i > 0 && u.Block != sum.Block:
			return sum, status.Error(codes.InvalidArgument, "one volume cannot have both access types, mount and block")
		case i == 0 || u.Mode.includes(sum.Mode):
			sum = usage{Mode: u.Mode, Block: u.Block}
		}
	}
	return sum, nil
}

// checkCapability checks that the volume has a capability; nil is no capability to check.
func checkCapability(r record, c *csi.VolumeCapability) error {
	if c == nil {
		return nil
	}
	u, err := readUsage(c)
	if err == nil && !r.Usage.fits(u) {
		err = status.Errorf(codes.InvalidArgument, "volume %s was created for %s, not for %s", r.ID, r.Usage, u)
	}
	return err
}

// noParameters refuses parameters: loopfs has none.
func noParameters(parameters map[string]string) error {
	if len(parameters) > 0 {
		return status.Error(codes.InvalidArgument, "loopfs has no parameters; remove them")
	}
	return nil
}
