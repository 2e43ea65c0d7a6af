package disk

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Name is the name of a volume or snapshot in a request. It never becomes part of a path.
type Name string

// ID is the ID of a volume or snapshot. It is a hash of its name, and safe as a file name.
type ID string

// Kind is the first part of an ID.
type Kind string

// The kinds, as ids begin with them.
const (
	Volume    Kind = "vol"   // made by CreateVolume
	Snapshot  Kind = "snap"  // made by CreateSnapshot
	Ephemeral Kind = "eph"   // made by the publish of a volume that has an id of the caller's
	Group     Kind = "group" // made by CreateVolumeGroupSnapshot
)

// maxText is the limit of the CSI specification for strings, in bytes.
const maxText = 128

var mintedID = regexp.MustCompile(`^(vol|snap|eph|group)-[0-9a-f]{32}$`)

// IDFor returns the ID for a name. The same name has the same ID, which makes creation idempotent.
func IDFor(k Kind, name Name) ID { return ID(string(k) + "-" + digest(string(name))) }

// Kind returns the kind of the ID.
func (id ID) Kind() Kind {
	kind, _, _ := strings.Cut(string(id), "-")
	return Kind(kind)
}

// ParseName checks a name from a request. The error is ErrInvalid.
func ParseName(s string) (Name, error) {
	if err := CheckText("name", s, maxText); err != nil {
		return "", err
	}
	return Name(s), nil
}

// ParseID checks an ID of that kind from a request. The error is ErrInvalid if no ID looks like it, and ErrNotFound if
// no ID of loopfs does.
func ParseID(k Kind, s string) (ID, error) {
	what := map[Kind]string{Volume: "volume", Snapshot: "snapshot", Group: "group snapshot"}[k]
	if err := CheckText(what+" id", s, maxText); err != nil {
		return "", err
	}
	if !mintedID.MatchString(s) || ID(s).Kind() != k {
		return "", Errorf(ErrNotFound, "%s %q was not made by loopfs", what, s)
	}
	return ID(s), nil
}

// CheckText refuses an empty, long or hostile string: control characters, slashes, the names of directories.
func CheckText(what, s string, limit int) error {
	switch {
	case s == "":
		return Errorf(ErrInvalid, "%s is missing", what)
	case len(s) > limit:
		return Errorf(ErrInvalid, "%s has %d bytes, at most %d are allowed", what, len(s), limit)
	case !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl):
		return Errorf(ErrInvalid, "%s holds control characters or is not UTF-8", what)
	case strings.ContainsAny(s, `/\`), s == ".", s == "..":
		return Errorf(ErrInvalid, "%s %q looks like a path", what, s)
	}
	return nil
}

// digest returns 32 hex digits of the SHA-256 of s.
func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:16])
}
