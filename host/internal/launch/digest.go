package launch

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"holdfast/registry"
)

// Trust is why a digest is believed.
type Trust string

const (
	TrustGiven    Trust = "given"     // the caller knew the digest
	TrustFile     Trust = "file"      // it was read from the .sha256 file beside the binary
	TrustFirstUse Trust = "first use" // nobody knew it: it was computed from the binary, and recorded
	TrustRecorded Trust = "recorded"  // nobody knew it and the binary is gone: it is the one recorded for the path
)

// Digest names a binary by its content, and says what an Add has found out about it.
type Digest struct {
	SHA256 string // 64 lower-case hexadecimal digits
	Trust  Trust

	SourceGone bool   // nothing is at the path any more: its stored copy, verified, is used
	Replaces   string // the SHA-256 recorded for the path before, if it is another
	Unrecorded error  // why the path's record could not be written; the binary is stored all the same
}

func (d Digest) String() string { return d.SHA256 }

// Warnings are what somebody should know who looks after the path that was added, each a sentence without it. A binary that
// was replaced together with its digest is none.
func (d Digest) Warnings() []string {
	var all []string
	if d.SourceGone {
		all = append(all, "the shim's binary is gone; its verified copy in the store is used: install the binary again")
	}
	if d.Replaces != "" && d.Trust == TrustFirstUse {
		all = append(all, fmt.Sprintf("the shim's binary was replaced, and nobody has said by which: it was %s, and is trusted as %s",
			d.Replaces, d.SHA256))
	}
	if d.Unrecorded != nil {
		all = append(all, fmt.Sprintf("the shim's digest cannot be recorded: a later change of the binary may go unnoticed (%v)",
			d.Unrecorded))
	}
	return all
}

// wantedDigest finds out what the digest of path should be. Empty with TrustFirstUse: nobody knows.
func wantedDigest(path, want string) (string, Trust, error) {
	if want != "" {
		sum, err := parseSum(want)
		return sum, TrustGiven, err
	}
	beside := path + ".sha256"
	text, err := readShort(beside)
	if errors.Is(err, fs.ErrNotExist) {
		return "", TrustFirstUse, nil
	}
	if err != nil {
		return "", "", fmt.Errorf("read the shim's digest: %w", err)
	}
	sum, err := parseSum(text)
	if err != nil {
		return "", "", fmt.Errorf("read %s: %w", beside, err)
	}
	return sum, TrustFile, nil
}

func readShort(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 4096))
	return string(text), err
}

// parseSum takes a bare digest, or a line as sha256sum prints it.
func parseSum(text string) (string, error) {
	first, _, _ := strings.Cut(strings.TrimSpace(text), " ")
	sum := strings.ToLower(strings.TrimPrefix(first, "sha256:"))
	if raw, err := hex.DecodeString(sum); err != nil || len(raw) != sha256.Size {
		return "", registry.Invalid("%q is not a SHA-256 in 64 hexadecimal digits", first)
	}
	return sum, nil
}
