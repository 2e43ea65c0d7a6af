package cluster

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
)

// TestReportsLogAnErrorOnce reports equal and different errors in a row. Of equal errors in a row, only the first is
// logged.
func TestReportsLogAnErrorOnce(t *testing.T) {
	var out bytes.Buffer
	log, said := hclog.New(&hclog.LoggerOptions{Output: &out}), reports{}
	for _, text := range []string{"one", "one", "two", "one", "", "", "one", "one"} {
		var err error
		if text != "" {
			err = errors.New(text)
		}
		said.log(log, "cannot do it", err)
	}
	if n := strings.Count(out.String(), "cannot do it"); n != 4 {
		t.Errorf("%d lines:\n%s", n, out.String())
	}
}
