package disk

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Name is what a caller calls a volume. It never becomes part of a path.
type Name string

// ID is a volume id: minted by IDFor, and safe as a file name.
type ID string

// maxText is the general limit of the CSI specification for strings, in bytes.
const maxText = 128

var mintedID = regexp.MustCompile(`^vol-[0-9a-f]{32}$`)

// IDFor mints the id of the volume of that name. The same name has the same id, so CreateVolume is idempotent by itself.
func IDFor(name Name) ID { return ID("vol-" + digest(string(name))) }

// ParseName takes a volume name from a caller. What is refused is ErrInvalid.
func ParseName(s string) (Name, error) {
	if err := CheckText("volume name", s, maxText); err != nil {
		return "", err
	}
	return Name(s), nil
}

// ParseID takes a volume id from a caller. What could never be an id is ErrInvalid, what loopfs never minted ErrNotFound.
func ParseID(s string) (ID, error) {
	if err := CheckText("volume id", s, maxText); err != nil {
		return "", err
	}
	if !mintedID.MatchString(s) {
		return "", Errorf(ErrNotFound, "volume %q was not made by loopfs", s)
	}
	return ID(s), nil
}

// CheckText refuses a missing or hostile string: too long, control characters, slashes, or a name of a directory itself.
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
