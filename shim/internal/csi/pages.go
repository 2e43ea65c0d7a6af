package csi

import (
	"crypto/sha256"
	"errors"

	"holdfast/registry"
)

// Limits of a list that a plugin returns in pages, so that an endless list ends.
const (
	MaxPages    = 2000
	maxRestarts = 3 // after an expired token
)

var errEndless = registry.Errorf(registry.ErrInternal, "its pages have no end")

// ReadPages reads a plugin's list to its end. page reads the page of a token and returns the next token, which is empty
// after the last page. If a token has expired (ABORTED), ReadPages calls page with an empty token again, and the pages
// read before are void. An error of page ends the list.
func ReadPages(page func(token string) (next string, err error)) error {
	for restarts := 0; ; restarts++ {
		err := readPages(page)
		if call, is := errors.AsType[*registry.CallError](err); !is || call.Code != "ABORTED" ||
			restarts == maxRestarts {
			return err
		}
	}
}

// readPages reads all pages once, beginning with the first.
func readPages(page func(token string) (next string, err error)) error {
	used := map[[sha256.Size]byte]bool{} // tokens may be of any size
	for token := ""; len(used) < MaxPages; {
		next, err := page(token)
		if err != nil || next == "" {
			return err
		}
		sum := sha256.Sum256([]byte(next))
		if used[sum] {
			break
		}
		token = next
		used[sum] = true
	}
	return errEndless
}
