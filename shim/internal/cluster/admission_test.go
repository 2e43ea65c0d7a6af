package cluster

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
)

// TestReportsLogAnErrorOnce logs an error again only after another one, or none.
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
