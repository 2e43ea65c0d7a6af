package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
)

// part returns a part of a list of blocks, each of 10 bytes, in a volume of 100 bytes.
func part(offsets ...int64) registry.Blocks {
	b := registry.Blocks{Type: registry.FixedLength, Capacity: 100}
	for _, at := range offsets {
		b.Ranges = append(b.Ranges, registry.BlockRange{Offset: at, Size: 10})
	}
	return b
}

// parts returns an answer of several messages. code is the code at its end; empty: success.
func parts(code string, list ...registry.Blocks) scriptedAnswer {
	a := scriptedAnswer{blocks: list}
	if code != "" {
		a.err = noAnswer(code).err
	}
	return a
}

// changed returns a part with one block, after change has changed it.
func changed(at int64, change func(b *registry.Blocks, first *registry.BlockRange)) registry.Blocks {
	b := part(at)
	change(&b, &b.Ranges[0])
	return b
}

// openBlocks returns a desk with five snapshots. The test reads the blocks of s2.
func openBlocks(t *testing.T, answers ...scriptedAnswer) *snapshotDesk {
	d := openSnapshots(t, of(registry.SnapshotMetadata), answers...)
	for i, s := range []registry.VolumeSnapshot{{External: "snap-1"}, {External: "snap-2"}, {External: "snap-3"},
		{External: "snap-4", Source: "vol-other"}, {External: "snap-5", State: registry.SnapshotProcessing}} {
		s.Namespace, s.ID, s.Plugin = "default", []registry.SnapshotID{"s1", "s2", "s3", "other", "new"}[i], key.Plugin
		s.Taken = time.Unix(int64(i), 0)
		if s.Source == "" {
			s.Source = key.External
		}
		if s.State == "" {
			s.State = registry.SnapshotReady
		}
		d.put(s)
	}
	return d
}

// read lists the blocks of s2 as text.
func (d *snapshotDesk) read(base registry.SnapshotID, offset int64) (string, error) {
	var got []string
	q := registry.BlockQuery{
		Snapshot: registry.SnapshotName{Namespace: "default", ID: "s2"}, Base: base, Offset: offset,
	}
	err := d.Blocks(context.Background(), q, func(b registry.Blocks) error {
		for _, r := range b.Ranges {
			got = append(got, fmt.Sprintf("%d+%d", r.Offset, r.Size))
		}
		return nil
	})
	return strings.Join(got, " "), err
}

// Each block comes once and in order. If a call is cut off, the next call begins where it ended.
func TestBlocksComeOnceAndInOrder(t *testing.T) {
	const all, delta = "GetMetadataAllocated  snap-2 from %d", "GetMetadataDelta snap-1 snap-2 from %d"
	for name, c := range map[string]struct {
		base    registry.SnapshotID
		offset  int64
		answers []scriptedAnswer
		got     string
		calls   []string
		err     string
	}{
		"allocated": {"", 0, []scriptedAnswer{parts("", part(0, 10), part(30))}, "0+10 10+10 30+10", []string{all}, ""},
		"changed":   {"s1", 0, []scriptedAnswer{parts("", part(30))}, "30+10", []string{delta}, ""},
		"none":      {"s1", 0, []scriptedAnswer{parts("", part())}, "", []string{delta}, ""},
		"from an offset in a block": {"", 15, []scriptedAnswer{parts("", part(10, 20))}, "15+5 20+10",
			[]string{"GetMetadataAllocated  snap-2 from 15"}, ""},
		"cut off": {"", 0,
			[]scriptedAnswer{parts("UNAVAILABLE", part(0), part(20)), parts("UNAVAILABLE"), parts("", part(40))},
			"0+10 20+10 40+10",
			[]string{all, "GetMetadataAllocated  snap-2 from 30", "GetMetadataAllocated  snap-2 from 30"}, ""},
		"too slow, with progress": {"", 0, []scriptedAnswer{parts("DEADLINE_EXCEEDED", part(0)), parts("", part(40))},
			"0+10 40+10", []string{all, "GetMetadataAllocated  snap-2 from 10"}, ""},
		"too slow": {"", 0, []scriptedAnswer{parts("DEADLINE_EXCEEDED")}, "", []string{all}, "DEADLINE_EXCEEDED"},
		"a refusal": {"s1", 0, []scriptedAnswer{parts("FAILED_PRECONDITION", part(0))}, "0+10", []string{delta},
			"FAILED_PRECONDITION"},
		"base of another":   {"other", 0, nil, "", nil, "only snapshots of one volume"},
		"base taken later":  {"s3", 0, nil, "", nil, "was taken after"},
		"base not ready":    {"new", 0, nil, "", nil, "is processing"},
		"base missing":      {"none", 0, nil, "", nil, "not found"},
		"a negative offset": {"", -1, nil, "", nil, "cannot be negative"},
	} {
		runInBubble(t, name, func(t *testing.T) {
			d := openBlocks(t, c.answers...)
			got, err := d.read(c.base, c.offset)
			wantErr(t, "", err, nil, c.err)
			if got != c.got {
				t.Errorf("got %q, want %q", got, c.got)
			}
			for i, format := range c.calls {
				if strings.Contains(format, "%d") {
					c.calls[i] = fmt.Sprintf(format, 0)
				}
			}
			d.wantJournal(c.calls...)
		})
	}
	d := openSnapshots(t, of(registry.CreateSnapshot), answer(snapReady))
	noErr(t, "", errOf(d.Create(t.Context(), call, snapSpec)))
	err := d.Blocks(t.Context(), registry.BlockQuery{Snapshot: snapName}, nil)
	wantErr(t, "without the capability", err, registry.ErrUnsupported, "")
	// An error of the reader ends the list.
	d = openSnapshots(t, of(registry.CreateSnapshot, registry.SnapshotMetadata), answer(snapReady), parts("", part(0)))
	stop := errors.New("enough")
	noErr(t, "", errOf(d.Create(t.Context(), call, snapSpec)))
	err = d.Blocks(t.Context(), registry.BlockQuery{Snapshot: snapName}, func(registry.Blocks) error { return stop })
	if err != stop {
		t.Errorf("the reader's error: %v", err)
	}
}

// A list ends if its plugin sends no block for ten minutes. The time that the reader takes does not count.
func TestBlocksEndWithoutProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := []scriptedAnswer{parts("UNAVAILABLE", part(0))}
		d := openBlocks(t, append(answers, slices.Repeat([]scriptedAnswer{parts("UNAVAILABLE")}, 1000)...)...)
		begun := time.Now()
		q := registry.BlockQuery{Snapshot: registry.SnapshotName{Namespace: "default", ID: "s2"}}
		err := d.Blocks(t.Context(), q, func(registry.Blocks) error { time.Sleep(time.Hour); return nil })
		took := time.Since(begun)
		if err == nil || !strings.Contains(err.Error(), "no block for 10m0s") || took != time.Hour+blocksIdle {
			t.Errorf("after %v: %v", took, err)
		}
	})
}

// If CSI does not allow an answer, the list ends with an error that says what is wrong with it.
func TestBlocksThatCannotBeAreRefused(t *testing.T) {
	type (
		list  = registry.Blocks
		first = registry.BlockRange
	)
	for name, c := range map[string]struct {
		parts []registry.Blocks
		err   string
	}{
		"out of order":      {[]registry.Blocks{part(20, 10)}, "begins before 30"},
		"overlapping parts": {[]registry.Blocks{part(0), part(5)}, "begins before 10"},
		"beyond the volume": {[]registry.Blocks{part(95)}, "not in the volume of 100 bytes"},
		"overflowing": {[]registry.Blocks{changed(0, func(_ *list, r *first) { r.Offset, r.Size = 1<<62, 1<<62 })},
			"not in the volume"},
		"an empty range": {[]registry.Blocks{changed(0, func(_ *list, r *first) { r.Size = 0 })}, "not in the volume"},
		"another size": {[]registry.Blocks{part(0), changed(20, func(_ *list, r *first) { r.Size = 20 })},
			"the first one 10"},
		"another type": {
			[]registry.Blocks{part(0), changed(20, func(b *list, _ *first) { b.Type = registry.VariableLength })},
			"first, and then"},
		"another capacity": {[]registry.Blocks{part(0), changed(20, func(b *list, _ *first) { b.Capacity = 200 })},
			"first, and then"},
		"no type": {[]registry.Blocks{{Capacity: 100}}, "does not say the type"},
		"too many ranges": {
			[]registry.Blocks{changed(0, func(b *list, _ *first) { b.Ranges = make([]first, maxRanges+1) })},
			"at most 1000"},
	} {
		d := openBlocks(t, parts("", c.parts...))
		wantErr(t, name, errOf(d.read("", 0)), nil, c.err)
	}
	d := openBlocks(t, parts("", part(20)))
	wantErr(t, "before the offset", errOf(d.read("", 50)), nil, "ends before the offset 50")
}
