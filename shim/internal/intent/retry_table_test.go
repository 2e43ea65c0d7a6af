package intent

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/registry"
)

var update = flag.Bool("update", false, "write the golden document anew")

// rpcs are the calls that change something, in the order of a volume's life.
var rpcs = []registry.RPC{
	registry.CreateVolumeRPC, registry.ControllerPublishRPC, registry.NodeStageRPC, registry.NodePublishRPC,
	registry.NodeUnpublishRPC, registry.NodeUnstageRPC, registry.ControllerUnpublishRPC, registry.DeleteVolumeRPC,
	registry.ControllerExpandRPC, registry.NodeExpandRPC, registry.CreateSnapshotRPC, registry.DeleteSnapshotRPC,
	registry.CreateGroupSnapshotRPC, registry.DeleteGroupSnapshotRPC,
	registry.ControllerModifyRPC,
}

// tries returns how often a call may be sent at most. It follows the error scheme of the specification: the general
// codes, and those of each call.
func tries(rpc registry.RPC, code string) int {
	switch code {
	case "ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED":
		return Forever
	case "RESOURCE_EXHAUSTED": // a creation or an attachment may fit elsewhere
		if rpc == registry.CreateVolumeRPC || rpc == registry.ControllerPublishRPC || rpc.Alters() ||
			rpc == registry.CreateSnapshotRPC || rpc == registry.CreateGroupSnapshotRPC {
			return few
		}
		return Forever
	case "CANCELLED", "UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAUTHENTICATED", "", "CODE_99":
		return few
	case registry.CodeUnreadable: // not in the specification; if a volume was made, an operator decides
		if rpc != registry.CreateVolumeRPC {
			return few
		}
	case "NOT_FOUND": // "verify, and retry with exponential back off"
		if rpc == registry.ControllerPublishRPC || rpc == registry.NodeStageRPC || rpc == registry.NodePublishRPC ||
			rpc.Alters() {
			return few
		}
	case "FAILED_PRECONDITION": // attached elsewhere: "wait for it to be detached, and retry with exponential back off"
		if rpc == registry.ControllerPublishRPC {
			return Forever
		}
		// the spec: "ensure that volume is not published and retry"; on the node "MUST NOT retry"
		if rpc == registry.ControllerExpandRPC {
			return few
		}
	}
	return 1
}

// stays lists the codes that do not say whether a call took effect.
var stays = []string{"", "CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL",
	"UNAVAILABLE", "DATA_LOSS", "CODE_99",
	registry.CodeUnreadable}

// staysOpen reports whether the intent of a call stays open after the answer. The intent of an expansion or
// modification stays open only if the call may still run.
func staysOpen(rpc registry.RPC, code string) bool {
	if rpc == registry.CreateVolumeRPC && code == registry.CodeUnreadable {
		return false // the volume's record says what is left
	}
	answered := []string{"UNKNOWN", "INTERNAL", "DATA_LOSS", "RESOURCE_EXHAUSTED", "CODE_99", registry.CodeUnreadable}
	return slices.Contains(stays, code) && !(rpc.Alters() && slices.Contains(answered, code))
}

// For each code of each call, the table says how often the call is sent in an hour, and whether its intent stays open.
func TestRetryTable(t *testing.T) {
	codes := append(slices.Collect(maps.Keys(common)), "CODE_99")
	if len(rpcs) != len(Policies) || len(common) != 19 {
		t.Fatalf("the table has %d calls and %d codes", len(Policies), len(common))
	}
	for _, rpc := range rpcs {
		if PolicyOf(rpc).Deadline <= 0 {
			t.Errorf("%s has no deadline", rpc)
		}
		for _, code := range codes {
			want := tries(rpc, code)
			sent, open := sentInAnHour(t, rpc, code, OutcomeOf(rpc, code))
			if want == Forever && sent < 50 || want != Forever && sent != want {
				t.Errorf("%s that answers %q was sent %d times", rpc, code, sent)
			}
			if open != staysOpen(rpc, code) {
				t.Errorf("%s that answers %q leaves its intent open: %v", rpc, code, open)
			}
			if code != "" && Advice(rpc, code) == "" {
				t.Errorf("%s: nothing is advised about %q", rpc, code)
			}
		}
	}
}

const document = "../../../docs/retries.md"

// TestDocument compares docs/retries.md with the table, from which it is printed.
func TestDocument(t *testing.T) {
	want := drawn()
	if *update {
		if err := os.WriteFile(document, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(document)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("docs/retries.md is not what the table says (%v); "+
			"run go test ./shim/internal/intent -run Document -update", err)
	}
}

func drawn() []byte {
	var b bytes.Buffer
	b.WriteString(`# Retries

What Holdfast does about each answer of a CSI driver to a call that changes something. Printed from the retry table
(` + "`intent.Policies`" + `).

- *Failed*: the call has ended. What it may have done is undone.
- *Uncertain*: the call may still take effect. Until this is known, only the same call or its undo is sent for the
  volume.
- The wait between two tries doubles from the first to the last value given, minus up to half of it at random.
- "Until it succeeds" ends with the caller's deadline, or when the alloc is stopped.
- A call that could not be sent to the plugin has certainly failed.
- Expansions and modifications have no undo. After an inconclusive answer the same expansion is sent again before any
  other; a further modification repeats the parameters of the one before, unless it gives them other values. After no
  answer, a release of the volume waits for one round of tries, and then treats the answer as inconclusive.
- A swap cancels calls in flight, and the new shim repeats or undoes them. While the plugin answers such a call with
  ABORTED, the waits begin with 10 to 20 ms.
- A failed try is recorded if the next one follows more than 500 ms later, or more than 100 ms later and the error is
  new.

## Every call

`)
	drawRows(&b, common)
	b.WriteString("\nThe sections below list only what differs from this table.\n")
	for _, rpc := range rpcs {
		p := Policies[rpc]
		fmt.Fprintf(&b, "\n## %s\n\nOne try takes %s at most; waits of %s to %s.\n",
			rpc, short(p.Deadline), short(p.Backoff.First), short(p.Backoff.Max))
		differing := maps.Clone(p.Rows)
		maps.DeleteFunc(differing, func(code string, row Row) bool { return row == common[code] })
		if len(differing) > 0 {
			b.WriteString("\n")
			drawRows(&b, differing)
		}
	}
	return b.Bytes()
}

func drawRows(b *bytes.Buffer, rows map[string]Row) {
	b.WriteString("| answer | outcome | sent | what it means, and what to do |\n|---|---|---|---|\n")
	for _, code := range slices.Sorted(maps.Keys(rows)) {
		row := rows[code]
		fmt.Fprintf(b, "| %s | %s | %s | %s |\n", named(code), row.Outcome, often(row.Tries), row.Advice)
	}
}

func named(code string) string {
	switch code {
	case "":
		return "no answer"
	case "OK":
		return "`OK`, but not done"
	}
	return "`" + code + "`"
}

func often(tries int) string {
	switch tries {
	case 1:
		return "once"
	case Forever:
		return "until it succeeds"
	}
	return fmt.Sprintf("%d times", tries)
}

func short(d time.Duration) string {
	if text, whole := strings.CutSuffix(d.String(), "m0s"); whole {
		return text + "m"
	}
	return d.String()
}
