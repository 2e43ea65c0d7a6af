package store

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// Options of Open.
type Options struct {
	Path string // of the file; its directory is the state directory
	// Generation is the generation to write under. 0 takes the next one. A number above the file's generation is
	// stored, and one below is fenced. With the file's own generation, the file may be on a read-only file system.
	Generation registry.Generation
	// ReleasedAt is the revision at which the previous shim says that it left the file. If the file is at that
	// revision, Open does not verify it again: that shim has verified it, and made every commit since. The zero value
	// means that the previous shim has not released the file.
	ReleasedAt registry.Revision
	LockLimit  time.Duration // for the lock of the file, not for its verification; 0: no limit but ctx
	Boot       string        // boot ID, /proc/sys/kernel/random/boot_id
	Now        func() time.Time
	// Applied is called with each change that is on disk, in commit order, before its Commit returns. It must not call
	// Commit, and must not block, because no other change is committed meanwhile.
	Applied func(registry.Applied)
	// Committing is called with each change directly before its transaction is committed; nil: nothing is called. Tests
	// end the process there.
	Committing func(registry.Change)
	EventLimit int // events kept; 0: registry.MaxEvents
	Logger     hclog.Logger
	Throwaway  bool // the file is a copy that is not needed after Close: writes to it are not synced

	schema *schema
}

func (o Options) withDefaults() Options {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Applied == nil {
		o.Applied = func(registry.Applied) {}
	}
	if o.Committing == nil {
		o.Committing = func(registry.Change) {}
	}
	if o.EventLimit <= 0 {
		o.EventLimit = registry.MaxEvents
	}
	if o.Logger == nil {
		o.Logger = hclog.NewNullLogger()
	}
	if o.schema == nil {
		o.schema = &released
	}
	return o
}

// Store is an open state file. It holds the file's lock until Close.
type Store struct {
	options    Options
	path       string
	file       *os.File // bbolt's own file; bbolt closes it
	db         *bolt.DB
	generation registry.Generation
	readOnly   bool   // the file system was read-only when the file was opened
	window     window // window of the file before it was opened
	queue      *queue
	readers    readers
	writing    sync.Mutex // held while a batch is written, and by Check and Close to keep the file as it is
	reserved   int64      // bytes allocated from the start of the file; guarded by writing

	stop    sync.Once
	stopped chan struct{} // closed when nothing may be written any more
	reason  error         // set before stopped is closed
}

var _ registry.State = (*Store)(nil)

// Open opens the file. It verifies it first, unless the file is as the previous shim has released it
// (Options.ReleasedAt). It waits for the file's lock for LockLimit at most, or until ctx ends. It creates a missing
// file. It leaves a damaged file as it is, and returns ErrDamaged. Migrations and the new generation are one
// transaction. Open starts no goroutine: a commit waits for Run.
func Open(ctx context.Context, options Options) (*Store, error) {
	options = options.withDefaults()
	path, err := filepath.Abs(options.Path)
	if err != nil {
		return nil, registry.Invalid("state file %q: %v", options.Path, err)
	}
	if err := ensureDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	o, err := openVerified(ctx, path, options)
	if err != nil {
		return nil, err
	}
	s := &Store{
		options: options, path: path, file: o.file, db: o.db, readOnly: !writable(o.file), window: o.window,
		queue: newQueue(), stopped: make(chan struct{}),
	}
	if err := s.takeOver(o.fileState); err != nil {
		_ = o.db.Close()
		return nil, err
	}
	return s, nil
}

// opened is a state file that is open in bbolt.
type opened struct {
	file *os.File // bbolt's own file; bbolt closes it
	db   *bolt.DB
	fileState
}

// openVerified opens the file, and verifies it first unless it is as the previous shim has released it or was just
// created.
func openVerified(ctx context.Context, path string, options Options) (opened, error) {
	if options.ReleasedAt != (registry.Revision{}) {
		if o, same, err := openReleased(ctx, path, options); same || err != nil {
			return o, err
		}
	}
	file, created, err := openWithin(ctx, path, options)
	if err != nil {
		return opened{}, err
	}
	if !created {
		if err := verifyCopy(ctx, file); err != nil {
			if errors.Is(err, registry.ErrDamaged) {
				err = quarantine(path, file, options.Now(), err)
			}
			_ = file.Close()
			return opened{}, err
		}
	}
	o, err := openBolt(path, file, options.Throwaway)
	if err != nil {
		return opened{}, err
	}
	return o, o.checkOpenable(path, options)
}

// openReleased opens the file without verification if it is as the previous shim has released it (Options.ReleasedAt).
// If it is not, same is false, and the file has to be verified.
func openReleased(ctx context.Context, path string, options Options) (o opened, same bool, err error) {
	file, _, err := openWithin(ctx, path, options)
	if err != nil {
		return o, false, err
	}
	if checkMetas(file) != nil {
		_ = file.Close()
		return o, false, nil
	}
	if o, err = openBolt(path, file, options.Throwaway); err != nil {
		return o, false, nil
	}
	if o.revision() != options.ReleasedAt {
		_ = o.db.Close()
		return o, false, nil
	}
	return o, true, o.checkOpenable(path, options)
}

// openWithin is openLocked with the limit LockLimit.
func openWithin(ctx context.Context, path string, options Options) (file *os.File, created bool, err error) {
	if options.LockLimit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, options.LockLimit)
		defer cancel()
	}
	return openLocked(ctx, path, *options.schema, options.Generation != 0)
}

// fileState is the part of the meta bucket on which Open bases its decisions.
type fileState struct {
	window     window
	generation registry.Generation
	boot       string
	seq        registry.Seq
}

func (s fileState) revision() registry.Revision {
	return registry.Revision{Generation: s.generation, Index: s.seq}
}

func stateOf(tx *bolt.Tx) (s fileState) {
	for name, into := range map[string]any{
		metaSchema: &s.window, metaGeneration: &s.generation, metaBoot: &s.boot, metaSeq: &s.seq,
		metaFloor: new(registry.Seq), // only to find out whether it can be read
	} {
		getMeta(tx, name, into)
	}
	return s
}

// checkOpenable closes the file and returns an error if this build or generation may not write it.
func (o opened) checkOpenable(path string, options Options) error {
	err := options.schema.accepts(path, o.window)
	if err == nil && options.Generation != 0 && options.Generation < o.generation {
		err = registry.Errorf(registry.ErrFenced, "generation %d may not open %s: generation %d owns it",
			options.Generation, path, o.generation)
	}
	if err != nil {
		_ = o.db.Close()
	}
	return err
}

// takeOver migrates the file and stores the generation and the boot ID in one transaction, and opens the store for
// views. If the file is up to date, takeOver writes nothing. On a read-only file system it does not store the boot ID,
// and fails if anything else would have to be stored.
func (s *Store) takeOver(found fileState) (err error) {
	defer recoverDamage(&err)
	s.generation = s.options.Generation
	if s.generation == 0 {
		s.generation = found.generation + 1
	}
	outdated := s.generation != found.generation || !s.options.schema.isCurrent(found.window)
	if s.readOnly && outdated {
		return registry.Errorf(registry.ErrUnavailable,
			"%s is on a read-only file system, so a new generation cannot be stored there; mount it for writing",
			s.path)
	}
	if !s.readOnly && (outdated || s.options.Boot != found.boot) {
		if err := s.writeTakeOver(found); err != nil {
			return err
		}
	}
	return s.readers.publish(s.db)
}

func (s *Store) writeTakeOver(found fileState) error {
	tx, err := s.db.Begin(true)
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "take over %s: %w", s.path, err)
	}
	defer func() { _ = tx.Rollback() }() // of no effect after Commit
	t := newTransaction(tx)
	err = s.options.schema.migrate(t, found.window)
	if err == nil {
		err = errors.Join(t.setMeta(metaGeneration, s.generation), t.setMeta(metaBoot, s.options.Boot),
			t.writeTallies())
	}
	if err != nil {
		return diskError("take over "+s.path, err)
	}
	before, err := s.metas()
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "read meta pages: %w", err)
	}
	if err := tx.Commit(); err != nil {
		return s.commitError(before, err)
	}
	return nil
}

// Generation returns the generation that this store writes under.
func (s *Store) Generation() registry.Generation { return s.generation }

// PreviousSchema returns the schema number that the file had when it was opened.
func (s *Store) PreviousSchema() int { return s.window.Number }

// Readable returns the oldest schema whose builds can open the file as it is now.
func (s *Store) Readable() int { return s.options.schema.migratedWindow(s.window).Readable }

// Index returns the index of the last change on disk.
func (s *Store) Index() registry.Seq { return s.readers.index() }

// Count returns the number of records in each bucket, and the index of the answer. It reads no record.
func (s *Store) Count(of ...registry.Bucket) (records []int, at registry.Seq, err error) {
	err = s.read(func(p *pin) error {
		at = p.seq
		for _, bucket := range of {
			var sum tally
			getMeta(p.tx, metaTally+string(bucket), &sum)
			records = append(records, int(sum.Records))
		}
		return nil
	})
	return records, at, err
}

// View calls read with the last committed state. It does not wait. While a view runs, bbolt reuses no freed pages, so
// each commit makes the file larger.
func (s *Store) View(ctx context.Context, read func(registry.View) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return s.read(func(p *pin) error { return read(registry.View{Reader: s.reader(p.tx, p.head)}) })
}

func (s *Store) reader(tx *bolt.Tx, h *head) reader {
	return reader{tx, h, s.options.schema.forms}
}

// Snapshot writes a copy of the file as of the last commit, and returns the index of that commit. Commits continue
// meanwhile.
func (s *Store) Snapshot(ctx context.Context, w io.Writer) (registry.Seq, error) {
	p, err := s.readers.acquire()
	if err != nil {
		return 0, err
	}
	defer s.readers.release(p)
	out := &contextWriter{ctx: ctx, to: w}
	if _, err := p.tx.WriteTo(out); err != nil {
		return 0, registry.Errorf(registry.ErrUnavailable, "snapshot of %s: %w", s.path, cmp.Or(out.err, err))
	}
	return p.seq, nil
}

// contextWriter is a writer that fails when its context has ended. It keeps its error, because bbolt passes on only the
// text.
type contextWriter struct {
	ctx context.Context
	to  io.Writer
	err error
}

func (w *contextWriter) Write(b []byte) (n int, err error) {
	if w.ctx.Err() != nil {
		w.err = context.Cause(w.ctx)
		return 0, w.err
	}
	n, w.err = w.to.Write(b)
	return n, w.err
}

// Close waits for the running transaction and views, and releases the lock. Waiting commits fail.
func (s *Store) Close() error {
	s.fail(registry.Errorf(registry.ErrUnavailable, "the store is closed"))
	s.writing.Lock()
	defer s.writing.Unlock()
	s.readers.close()
	if err := s.db.Close(); err != nil {
		return registry.Errorf(registry.ErrUnavailable, "close %s: %w", s.path, err)
	}
	return nil
}
