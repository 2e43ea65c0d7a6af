package main

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// volumeID is the ID of a volume, a snapshot or a group: a kind and a hash of the name, so it is safe as a file name.
// The ID of a snapshot in a group has the hash of the group and that of the source volume.
type volumeID string

// kind is the first part of an ID.
type kind string

const (
	volumeKind   kind = "vol"   // made by CreateVolume
	snapshotKind kind = "snap"  // made by CreateSnapshot, or as part of a group
	groupKind    kind = "group" // made by CreateVolumeGroupSnapshot
	inlineKind   kind = "eph"   // made by the publish of an inline volume
)

var madeHere = regexp.MustCompile(`^(vol|snap|eph|group)-([0-9a-f]{32})(-[0-9a-f]{32})?$`)

// idFor returns the ID for a name. The same name has the same ID, which makes creation idempotent.
func idFor(k kind, name string) volumeID { return volumeID(string(k) + "-" + digest(name)) }

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

// parseID checks an ID of that kind from a request. The error is INVALID_ARGUMENT if no ID looks like it, and NOT_FOUND
// if no ID of loopfs does.
func parseID(k kind, s string) (volumeID, error) {
	if err := checkText(string(k)+" id", s, 128); err != nil {
		return "", err
	}
	if id := volumeID(s); id.valid() && id.kind() == k {
		return id, nil
	}
	return "", status.Errorf(codes.NotFound, "%s %q was not made by loopfs", k, s)
}

// checkText refuses an empty, long or hostile string: control characters, slashes, the names of directories.
func checkText(what, s string, limit int) error {
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

// checkName checks the name of a new volume, snapshot or group.
func checkName(name string) error { return checkText("name", name, 128) }

// digestOf returns a digest of a list, or an empty string for an empty one. It may hold secrets, so it is not stored
// itself.
func digestOf(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return digest(strings.Join(list, ","))
}

// digest returns 32 hex digits of the SHA-256 of s.
func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:16])
}
