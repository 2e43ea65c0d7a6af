package disk

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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
	Snapshot  Kind = "snap"  // made by CreateSnapshot, or as part of a group
	Group     Kind = "group" // made by CreateVolumeGroupSnapshot
	Ephemeral Kind = "eph"   // made by the publish of a volume that has an id of the caller's
)

var madeHere = regexp.MustCompile(`^(vol|snap|eph|group)-[0-9a-f]{32}$`)

// IDFor returns the ID for a name. The same name has the same ID, which makes creation idempotent.
func IDFor(k Kind, name Name) ID { return ID(string(k) + "-" + digest(string(name))) }

// Kind returns the kind of the ID.
func (id ID) Kind() Kind {
	kind, _, _ := strings.Cut(string(id), "-")
	return Kind(kind)
}

// ParseName checks a name from a request.
func ParseName(s string) (Name, error) { return Name(s), CheckText("name", s, 128) }

// ParseID checks an ID of that kind from a request. The error is INVALID_ARGUMENT if no ID looks like it, and NOT_FOUND
// if no ID of loopfs does.
func ParseID(k Kind, s string) (ID, error) {
	if err := CheckText(string(k)+" id", s, 128); err != nil {
		return "", err
	}
	if !madeHere.MatchString(s) || ID(s).Kind() != k {
		return "", status.Errorf(codes.NotFound, "%s %q was not made by loopfs", k, s)
	}
	return ID(s), nil
}

// CheckText refuses an empty, long or hostile string: control characters, slashes, the names of directories.
func CheckText(what, s string, limit int) error {
	switch {
	case s == "":
		return status.Errorf(codes.InvalidArgument, "%s is missing", what)
	case len(s) > limit:
		return status.Errorf(codes.InvalidArgument, "%s has %d bytes, at most %d are allowed", what, len(s), limit)
	case !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl):
		return status.Errorf(codes.InvalidArgument, "%s holds control characters or is not UTF-8", what)
	case strings.ContainsAny(s, `/\`), s == ".", s == "..":
		return status.Errorf(codes.InvalidArgument, "%s %q looks like a path", what, s)
	}
	return nil
}

// Digest returns a digest of a map or list, or an empty string for an empty one. They may hold secrets, so they are not
// stored themselves.
func Digest[T map[string]string | []string](value T) string {
	if len(value) == 0 {
		return ""
	}
	text, _ := json.Marshal(value) // never fails for strings
	return digest(string(text))
}

// digest returns 32 hex digits of the SHA-256 of s.
func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:16])
}
