// Package browser checks the status page of a real agent in a real browser: Debian's chromium, without a display. It is
// a module of its own, so that Holdfast does not depend on the browser's client.
package browser

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

var update = flag.Bool("update", false, "write docs/status-page.png")

const (
	root  = "../../../.."
	limit = time.Minute // for anything that is waited for
)

// agent is a holdfast agent with the status page, and its programs.
type agent struct {
	t      *testing.T
	dir    string // short: sockets lie below
	url    string
	cmd    *exec.Cmd
	output bytes.Buffer
}

func startAgent(t *testing.T) *agent {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{t: t, dir: dir}
	for name, pkg := range map[string]string{"holdfast": "./host/cmd/holdfast", "holdfast-shim": "./shim",
		"loopfs": "./examples/loopfs"} {
		build := exec.Command("go", "build", "-o", a.path(name), pkg)
		build.Dir = root
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", pkg, err, out)
		}
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a.url = "http://" + free.Addr().String() + "/"
	free.Close()
	a.cmd = exec.Command(a.path("holdfast"), "agent", "--state-dir", a.path("s"), "--run-dir", a.path("r"),
		"--node", "node-1", "--stop-tasks", "--shim-bake", "100ms", "--http", free.Addr().String())
	a.cmd.Stdout, a.cmd.Stderr = &a.output, &a.output
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.stop)
	for deadline := time.Now().Add(limit); ; time.Sleep(50 * time.Millisecond) {
		if conn, err := net.Dial("unix", a.path("r/agent.sock")); err == nil {
			conn.Close()
			return a
		}
		if time.Now().After(deadline) {
			t.Fatal("the agent does not answer")
		}
	}
}

func (a *agent) path(name string) string { return filepath.Join(a.dir, name) }

// run runs a command of holdfast.
func (a *agent) run(args ...string) error {
	cmd := exec.Command(a.path("holdfast"), append([]string{"--address", a.path("r/agent.sock")}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("holdfast %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

func (a *agent) must(args ...string) {
	a.t.Helper()
	if err := a.run(args...); err != nil {
		a.t.Fatal(err)
	}
}

// end sends SIGTERM and waits for the end, with all tasks and mounts.
func (a *agent) end() error {
	if a.cmd.ProcessState != nil {
		return nil
	}
	if err := a.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return a.cmd.Wait()
}

func (a *agent) stop() {
	err := a.end()
	if err != nil || a.t.Failed() {
		a.t.Errorf("the agent: %v; %s stays\n%s", err, a.dir, a.output.Bytes())
		return
	}
	if err := os.RemoveAll(a.dir); err != nil {
		a.t.Error(err)
	}
}

// browser is a page in a browser.
type browser struct {
	context.Context
	t *testing.T

	mu       sync.Mutex
	problems []string // messages on the console, exceptions and dialogs
}

func openBrowser(t *testing.T) *browser {
	t.Helper()
	program, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatalf("%v; install the Debian package chromium", err)
	}
	allocator, cancel := chromedp.NewExecAllocator(t.Context(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(program), chromedp.NoSandbox, chromedp.WSURLReadTimeout(limit))...)
	t.Cleanup(cancel)
	ctx, closePage := chromedp.NewContext(allocator)
	t.Cleanup(closePage)
	b := &browser{Context: ctx, t: t}
	if err := chromedp.Listen(ctx, b.note); err != nil {
		t.Fatal(err)
	}
	return b
}

// note keeps what a page without errors and injected scripts never does.
func (b *browser) note(event any) {
	text := ""
	switch e := event.(type) {
	case *runtime.EventConsoleAPICalled:
		text = fmt.Sprintf("console: %s", e.Type)
	case *runtime.EventExceptionThrown:
		text = "exception: " + e.ExceptionDetails.Text
	case *log.EventEntryAdded: // violations of the Content-Security-Policy, and requests that failed
		text = fmt.Sprintf("log: %s %s %s", e.Entry.Level, e.Entry.Text, e.Entry.URL)
	case *page.EventJavascriptDialogOpening:
		text = "dialog: " + e.Message
	}
	if text != "" {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.problems = append(b.problems, text)
	}
}

// do runs an action and returns its value.
func do[T any](b *browser, action chromedp.Action[T]) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b, limit)
	defer cancel()
	value, err := chromedp.Run(ctx, action)
	if err != nil {
		b.t.Fatal(err)
	}
	return value
}

// await waits until the text of an element matches a regular expression.
func (b *browser) await(selector, pattern string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b, limit)
	defer cancel()
	expression := fmt.Sprintf("new RegExp(%q, 's').test(document.querySelector(%q)?.innerText)", pattern, selector)
	_, err := chromedp.Run(ctx, chromedp.Poll[bool](expression, chromedp.WithPollingTimeout(limit)))
	if err != nil {
		text := do(b, chromedp.Evaluate[string]("document.body.innerText"))
		b.t.Fatalf("%s does not match %s: %v\n%s", selector, pattern, err, text)
	}
}

// fits requires that the page does not scroll sideways in a window of this width.
func (b *browser) fits(width int64) {
	b.t.Helper()
	do(b, chromedp.EmulateViewport(width, 900))
	if got := do(b, chromedp.Evaluate[int64]("document.documentElement.scrollWidth")); got > width {
		b.t.Errorf("the page is %d pixels wide in a window of %d", got, width)
	}
}

// scripts switches JavaScript off or on, and loads the page again.
func (b *browser) scripts(on bool) {
	b.t.Helper()
	off := emulation.SetScriptExecutionDisabledParams{Value: !on}
	if _, err := chromedp.Call(b, emulation.SetScriptExecutionDisabled, off); err != nil {
		b.t.Fatal(err)
	}
	do(b, chromedp.Reload())
}

// injected counts elements that the page does not have itself.
const injected = "document.querySelectorAll('main :is(img, b, i, script), [onmouseover], [onerror]').length"

func TestStatusPageInABrowser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	a, b := startAgent(t), openBrowser(t)
	do(b, chromedp.EmulateViewport(1100, 900))
	do(b, chromedp.Navigate(a.url))
	b.await("#live", "^Live")
	for section, text := range map[string]string{
		"#plugins": "No plugins.*holdfast job run", "#jobs": "No jobs.*holdfast job run",
		"#volumes": "No volumes.*holdfast volume create", "#shim": "No swaps.*holdfast shim swap",
		"#events": "No events",
	} {
		b.await(section, text)
	}
	do(b, chromedp.Evaluate[bool]("window.sameDocument = true"))
	for _, hidden := range []bool{true, false} {
		do(b, chromedp.Poll[bool](fmt.Sprintf("!busy && (Object.defineProperty(document, 'hidden', {value: %t, "+
			"configurable: true}), document.dispatchEvent(new Event('visibilitychange')), window.asks = busy, true)",
			hidden), chromedp.WithPollingTimeout(limit)))
		if asks := do(b, chromedp.Evaluate[bool]("asks")); asks == hidden {
			t.Errorf("hidden: %t, and the page asks for changes: %t", hidden, asks)
		}
	}

	a.must("job", "run", "--wait", "--var", "loopfs="+a.path("loopfs"), "--var", "data="+a.path("data"),
		root+"/examples/hcl/demo/loopfs.hcl")
	b.await("#plugins tbody", "loopfs.*healthy.*1 of 1 as csi-node")
	a.must("volume", "create", "testdata/db.volume.hcl")
	a.must("job", "run", "--wait", "testdata/db.hcl")
	b.await("#volumes tbody", "db.*ready.*job db")
	a.must("job", "run", "--var", "job=report", "testdata/db.hcl")
	b.await("#volumes tbody", "waiting.*held by job db.*Alloc: .* of job report.*holdfast job stop --wait db")
	b.await("#jobs tbody", "report.*pending")
	b.await("#volumes meter + small", "MiB of .* used")
	// A relative time changes in place.
	do(b, chromedp.Evaluate[bool]("window.jobs = document.querySelector('#jobs tbody'), "+
		"window.age = jobs.querySelector('time').innerText, true"))
	do(b, chromedp.Poll[bool]("document.querySelector('#jobs tbody time').innerText !== age",
		chromedp.WithPollingTimeout(limit)))
	if !do(b, chromedp.Evaluate[bool]("document.querySelector('#jobs tbody') === jobs")) {
		t.Error("a new relative time replaced its section")
	}
	a.must("shim", "swap", a.path("holdfast-shim"))
	b.await("#shim tbody", "committed.*to ")
	b.await("#summary", "1 of 1 plugins healthy.*1 volume waited for")
	b.screenshot()

	a.must("volume", "create", "testdata/hostile.volume.hcl")
	a.must("job", "run", "testdata/hostile.hcl")
	b.await("#volumes tbody", "<img src=x onerror=alert\\(1\\)>")
	b.await("#jobs tbody", "<b onmouseover=alert\\(2\\)>.*<script>.*<script>alert\\(3\\)</script>.*u001b.*u202e")
	if n := do(b, chromedp.Evaluate[int](injected)); n > 0 {
		t.Errorf("%d elements come from hostile text", n)
	}
	for _, width := range []int64{360, 768, 1100} {
		b.fits(width)
	}
	if !do(b, chromedp.Evaluate[bool]("window.sameDocument === true")) {
		t.Error("the page was loaded again")
	}

	b.scripts(false)
	for selector, text := range map[string]string{"#live": "Reload the page", "#jobs": "report"} {
		if got := do(b, chromedp.Text(selector)); !strings.Contains(got, text) {
			t.Errorf("without JavaScript, %s is %q", selector, got)
		}
	}
	b.scripts(true)
	b.await("#live", "^Live")
	b.mu.Lock()
	for _, p := range b.problems {
		t.Error(p)
	}
	b.mu.Unlock()

	if err := a.end(); err != nil { // while the browser follows it
		t.Error(err)
	}
	b.await("#live", "does not answer")
}

// screenshot writes the picture of the documentation, if that is wanted.
func (b *browser) screenshot() {
	b.t.Helper()
	if !*update {
		return
	}
	whole, err := png.Decode(bytes.NewReader(do(b, chromedp.FullScreenshot(100))))
	if err != nil {
		b.t.Fatal(err)
	}
	picture := image.NewPaletted(whole.Bounds(), commonColors(whole))
	draw.Draw(picture, whole.Bounds(), whole, image.Point{}, draw.Src)
	var out bytes.Buffer
	err = (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, picture)
	if err == nil {
		err = os.WriteFile(root+"/docs/status-page.png", out.Bytes(), 0o644)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// commonColors returns the 256 most frequent colors of a picture, which make its file a third as large.
func commonColors(of image.Image) (list color.Palette) {
	count := map[color.Color]int{}
	for y := range of.Bounds().Max.Y {
		for x := range of.Bounds().Max.X {
			count[of.At(x, y)]++
		}
	}
	for c := range count {
		list = append(list, c)
	}
	slices.SortFunc(list, func(x, y color.Color) int { return count[y] - count[x] })
	return list[:min(len(list), 256)]
}
