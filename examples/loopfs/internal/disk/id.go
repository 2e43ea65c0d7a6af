package disk

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Name is what a caller calls a volume or a snapshot. It never becomes part of a path.
type Name string

// ID is the id of a volume or a snapshot: minted here, and safe as a file name.
type ID string

// Kind says what an id is of.
type Kind string

// The kinds, as ids begin with them.
const (
	Volume    Kind = "vol"  // made by CreateVolume
	Snapshot  Kind = "snap" // made by CreateSnapshot
	Ephemeral Kind = "eph"  // made by the publish of a volume that has an id of the caller's
)

// maxText is the general limit of the CSI specification for strings, in bytes.
const maxText = 128

var mintedID = regexp.MustCompile(`^(vol|snap|eph)-[0-9a-f]{32}$`)

// IDFor mints the id of that kind for that name. The same name has the same id, so that making is idempotent by itself.
func IDFor(k Kind, name Name) ID { return ID(string(k) + "-" + digest(string(name))) }

// Kind is what the id is of.
func (id ID) Kind() Kind {
	kind, _, _ := strings.Cut(string(id), "-")
	return Kind(kind)
}

// ParseName takes the name of a volume or a snapshot from a caller. What is refused is ErrInvalid.
func ParseName(s string) (Name, error) {
	if err := CheckText("name", s, maxText); err != nil {
		return "", err
	}
	return Name(s), nil
}

// ParseID takes an id of that kind from a caller. What could never be an id is ErrInvalid, what loopfs never minted
// ErrNotFound.
func ParseID(k Kind, s string) (ID, error) {
	what := map[Kind]string{Volume: "volume", Snapshot: "snapshot"}[k]
	if err := CheckText(what+" id", s, maxText); err != nil {
		return "", err
	}
	if !mintedID.MatchString(s) || ID(s).Kind() != k {
		return "", Errorf(ErrNotFound, "%s %q was not made by loopfs", what, s)
	}
	return ID(s), nil
}

// CheckText refuses a missing or hostile string: too long, control characters, slashes, or a name of a directory
// itself.
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

// digest is 32 hex digits of the SHA-256 of s.
func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:16])
}
