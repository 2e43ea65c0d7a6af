package launch

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"holdfast/registry"
)

// Digest names a binary by its content, and says how Add has found it.
type Digest struct {
	SHA256     string // 64 lower-case hexadecimal digits
	FirstUse   bool   // no digest was given, or found beside the binary: this one was computed, and is trusted
	SourceGone bool   // nothing is at the path any more: the verified stored copy is used
}

// expectedDigest returns the digest that path should have: the given one, else that of the file path.sha256, else "".
func expectedDigest(path, want string) (string, error) {
	if want != "" {
		return parseSum(want)
	}
	beside := path + ".sha256"
	text, err := os.ReadFile(beside)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the shim's digest: %w", err)
	}
	sum, err := parseSum(string(text))
	if err != nil {
		return "", fmt.Errorf("read %s: %w", beside, err)
	}
	return sum, nil
}

// parseSum reads a digest, or a line of sha256sum.
func parseSum(text string) (string, error) {
	first, _, _ := strings.Cut(strings.TrimSpace(text), " ")
	sum := strings.ToLower(strings.TrimPrefix(first, "sha256:"))
	if raw, err := hex.DecodeString(sum); err != nil || len(raw) != sha256.Size {
		return "", registry.Invalid("%q is not a SHA-256 in 64 hexadecimal digits", first)
	}
	return sum, nil
}
