package browsertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"
)

// names are the names of programs that start Chromium.
var names = []string{"chromium-headless-shell", "headless-shell", "chromium", "chromium-browser", "google-chrome"}

// patience is the longest wait for the expected state of a page.
const patience = time.Minute

var errNoBrowser = errors.New("no headless Chromium in PATH: apt-get install chromium-headless-shell")

// browser is the browser of all tests. Each tab has cookies, cache and connections of its own.
var browser = sync.OnceValues(func() (context.Context, error) {
	program := ""
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			program = path
			break
		}
	}
	if program == "" {
		return nil, errNoBrowser
	}
	ctx, stop := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(program), chromedp.NoSandbox, chromedp.WindowSize(1280, 800),
		chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"), chromedp.Flag("no-proxy-server", true),
	)...)
	closeBrowser = stop // stop waits for its end
	ctx, _ = chromedp.NewContext(ctx)
	return ctx, chromedp.Do(ctx)
})

var closeBrowser = func() {}

func TestMain(m *testing.M) {
	code := m.Run()
	closeBrowser()
	os.Exit(code)
}

// tab is a tab of the browser that shows a dashboard. Messages of its console, and loads from other
// servers, fail the test.
type tab struct {
	t    *testing.T
	ctx  context.Context
	root string // URL of the dashboard

	mu      sync.Mutex
	faults  []string
	allowed []string // parts of console messages that are no faults
	dialogs []string // texts of the dialogs and alerts
	refuse  bool     // answer the next dialogs with no
}

// newTab opens a tab that shows the overview of a site.
func newTab(t *testing.T, s *site) *tab {
	t.Helper()
	b := needBrowser(t)
	w := &tab{t: t, root: s.root}
	var closeTab func()
	w.ctx, closeTab = chromedp.NewContext(b, chromedp.WithNewBrowserContext(), chromedp.WithListener(w.listen))
	t.Cleanup(func() {
		if t.Failed() {
			t.Log("the page:", w.look())
		}
		closeTab()
		w.mu.Lock()
		defer w.mu.Unlock()
		require.Empty(t, w.faults, "of the console, or loaded from elsewhere")
	})
	require.NoError(t, chromedp.Do(w.ctx)) // the tab lives as long as this context
	w.do(size(1280, 800, false))
	w.open("")
	return w
}

// needBrowser skips or fails a test if there is no browser.
func needBrowser(t *testing.T) context.Context {
	t.Helper()
	b, err := browser()
	if errors.Is(err, errNoBrowser) && os.Getenv("CODEQ_BROWSER") != "required" {
		t.Skip(err)
	}
	require.NoError(t, err)
	return b
}

// size sets the size of the viewport.
func size(width, height int64, phone bool) chromedp.Action[chromedp.Void] {
	if phone {
		return chromedp.EmulateViewport(width, height, chromedp.EmulateMobile)
	}
	return chromedp.EmulateViewport(width, height)
}

// scheme sets which colors the viewer prefers: "light" or "dark".
func scheme(name string) chromedp.Action[chromedp.Void] {
	return func(ctx context.Context, t *chromedp.Target) (v chromedp.Void, err error) {
		_, err = cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}},
		})
		return v, err
	}
}

// listen is called with each event of the tab, one at a time.
func (w *tab) listen(event any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	fault := func(format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		for _, part := range w.allowed {
			if strings.Contains(text, part) {
				return
			}
		}
		w.faults = append(w.faults, text)
	}
	switch e := event.(type) {
	case *log.EventEntryAdded: // also of the content security policy
		if e.Entry.Level == log.EntryLevelError || e.Entry.Level == log.EntryLevelWarning {
			fault("%s: %s %s", e.Entry.Source, e.Entry.Text, e.Entry.URL)
		}
	case *runtime.EventConsoleAPICalled:
		fault("console.%s: %+v", e.Type, e.Args)
	case *runtime.EventExceptionThrown:
		fault("%s (%+v)", e.ExceptionDetails.Text, e.ExceptionDetails.Exception)
	case *network.EventRequestWillBeSent:
		// The policy refuses data: to the page. The rest are pictures in the browser's own fields.
		if !strings.HasPrefix(e.Request.URL, w.root) && !strings.HasPrefix(e.Request.URL, "data:") {
			fault("it loads %s", e.Request.URL)
		}
	case *page.EventJavascriptDialogOpening:
		w.dialogs = append(w.dialogs, e.Message)
		accept := !w.refuse
		go func() {
			_, _ = chromedp.Call(w.ctx, page.HandleJavaScriptDialog, page.HandleJavaScriptDialogParams{Accept: accept})
		}()
	}
}

// allow accepts console messages that contain part.
func (w *tab) allow(part string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.allowed = append(w.allowed, part)
}

// asked returns the texts of the dialogs since the last call. next is the answer to the following
// ones.
func (w *tab) asked(next bool) (texts []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	texts, w.dialogs, w.refuse = w.dialogs, nil, !next
	return texts
}

func (w *tab) do(actions ...chromedp.Action[chromedp.Void]) {
	w.t.Helper()
	run(w, chromedp.Steps(actions...))
}

// run returns the value of an action.
func run[T any](w *tab, action chromedp.Action[T]) T {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	value, err := chromedp.Run(ctx, action)
	require.NoError(w.t, err)
	return value
}

// open shows a page of the dashboard, and waits until it is loaded.
func (w *tab) open(path string) {
	w.t.Helper()
	w.do(chromedp.Navigate(w.root + path))
}

// look returns the beginning of the text in the tab.
func (w *tab) look() string {
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	text, err := chromedp.Run(ctx, chromedp.Evaluate[string](`location.href + "\n" + document.body.innerText.slice(0, 1500)`))
	if err != nil {
		return err.Error()
	}
	return text
}

// quoted is a string of the script language.
func quoted(s string) string {
	text, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// eval returns the value of an expression in the page. A promise is awaited.
func eval[T any](w *tab, expression string) T {
	w.t.Helper()
	return run(w, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
}

// wait polls until an expression is true, also over the load of another page.
func (w *tab) wait(expression string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		is, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("!!("+expression+")")) // fails while a page is loaded
		if err == nil && is {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			require.FailNow(w.t, "the page does not come to this", "%s\n%v", expression, err)
		}
	}
}

// text returns the text of an element.
func (w *tab) text(selector string) string {
	w.t.Helper()
	return eval[string](w, "document.querySelector("+quoted(selector)+").textContent.trim()")
}

// waitText waits until an element shows a text.
func (w *tab) waitText(selector, text string) {
	w.t.Helper()
	w.wait("document.querySelector(" + quoted(selector) + ")?.textContent.trim() === " + quoted(text))
}

func (w *tab) count(selector string) int {
	w.t.Helper()
	return eval[int](w, "document.querySelectorAll("+quoted(selector)+").length")
}

// fill gives a field of a form a value.
func (w *tab) fill(selector, value string) {
	w.t.Helper()
	require.True(w.t, eval[bool](w, `(() => {
		const field = document.querySelector(`+quoted(selector)+`);
		if (!field?.checkVisibility()) return false;
		field.focus();
		if (field.type === "checkbox") field.checked = `+quoted(value)+` === "true";
		else field.value = `+quoted(value)+`;
		return field.type === "checkbox" || field.value === `+quoted(value)+`;
	})()`), "the field %s", selector)
}

// pressIn clicks an element that can be seen and is not covered, in one turn of the page, which may
// change at any time. It marks the page: the next one has no mark.
const pressIn = `(selector => {
	const element = document.querySelector(selector);
	if (!element) return "there is none";
	element.scrollIntoView({block: "center"});
	const box = element.getClientRects()[0]; // its first line
	if (!box) return "it is not drawn";
	const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
	if (!element.checkVisibility() || !element.contains(top)) return "it cannot be seen";
	window.marked = true;
	element.dispatchEvent(new MouseEvent("click", {bubbles: true, cancelable: true})); // click is not for SVG
	return "";
})`

// press clicks an element, once it is there: a page shows a sample that is up to a second old, and
// changes with the next sample.
func (w *tab) press(selector string) {
	w.t.Helper()
	w.wait("document.querySelector(" + quoted(selector) + ")")
	require.Empty(w.t, eval[string](w, pressIn+"("+quoted(selector)+")"), "press %s", selector)
}

// follow clicks an element that leads to another page, and waits for that page.
func (w *tab) follow(selector string) {
	w.t.Helper()
	w.press(selector)
	w.loaded()
}

// followJob follows to the page of a job, and waits until the job has ended.
func (w *tab) followJob(selector string) {
	w.t.Helper()
	w.follow(selector)
	w.wait(`document.querySelector("#job").dataset.ended === "true"`)
}

// loaded waits until the page after the last press is loaded.
func (w *tab) loaded() {
	w.t.Helper()
	w.wait(`!window.marked && document.readyState === "complete"`)
}

// submit clicks the button of a form, and requires that the next page reports the change.
func (w *tab) submit(selector, done string) {
	w.t.Helper()
	w.follow(selector)
	require.Equal(w.t, 1, w.count("#done"), "after %s the page tells nothing:\n%s", selector, w.look())
	require.Equal(w.t, done, w.text("#done"))
}

// keys presses keys, as at a keyboard: a shortcut of the page does not also write its character.
func (w *tab) keys(text string) {
	w.t.Helper()
	w.do(func(ctx context.Context, t *chromedp.Target) (v chromedp.Void, err error) {
		for _, r := range text {
			events := kb.Encode(r) // down, perhaps a character, and up
			down, up := *events[0], *events[len(events)-1]
			if len(events) == 3 {
				down.Type, down.Text = input.DispatchKeyEventTypeKeyDown, events[1].Text
			}
			for _, e := range []input.DispatchKeyEventParams{down, up} {
				if _, err := cdp.Call(ctx, t, input.DispatchKeyEvent, e); err != nil {
					return v, err
				}
			}
		}
		return v, nil
	})
}

// mark marks the page: the next one has no mark.
func (w *tab) mark() {
	w.t.Helper()
	w.do(chromedp.Evaluate[chromedp.Void]("window.marked = true"))
}

// same requires that the marked page was not loaded again.
func (w *tab) same() {
	w.t.Helper()
	require.True(w.t, eval[bool](w, "window.marked === true"), "the page was loaded again")
}
