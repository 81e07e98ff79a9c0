package browsertest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// flowed serves a queue with a flow of many tasks: some done, one dead, and one at the end.
func flowed(t *testing.T) (s *site, dead, last codeq.ID) {
	s = newSite(t, codeq.Options{Shards: 1, Retention: time.Hour})
	ctx := context.Background()
	first := s.produce(codeq.Task{Queue: "split", Kind: "orders of a day"})
	batch := make([]codeq.Task, 1200)
	for i := range batch {
		batch[i] = codeq.Task{Queue: "mail", After: []codeq.ID{first}}
	}
	middle, err := s.q.ProduceBatch(ctx, batch)
	require.NoError(t, err)
	last = s.produce(codeq.Task{Queue: "report", After: middle})
	s.produce(codeq.Task{Queue: "archive", After: []codeq.ID{last}})
	require.NoError(t, s.q.Complete(ctx, s.claim("split").Receipt, nil))
	for range 100 {
		require.NoError(t, s.q.Complete(ctx, s.claim("mail").Receipt, nil))
	}
	l := s.claim("mail")
	require.NoError(t, s.q.DeadLetter(ctx, l.Receipt, errors.New("no such user")))
	s.claim("mail")
	return s, l.ID, last
}

// TestFlow: the flow is drawn, is used by the keyboard, and its tasks are changed in it.
func TestFlow(t *testing.T) {
	t.Parallel()
	s, dead, last := flowed(t)
	w := newTab(t, s)
	w.open("task?id=" + last.String())
	require.Contains(t, w.text("#why"), "It waits for some of its 1,200 parents: the first 100 have ended. The flow has all of them.")
	w.follow("#flow")
	w.wait(`document.querySelectorAll("#graph a.node").length === 7`)
	require.Equal(t, 9, w.count("#graph path.edge"))
	require.False(t, eval[bool](w, `document.querySelector("#levels").open`), "the graph stands for the table")
	names := eval[[]string](w, `[...document.querySelectorAll("#graph a.node")].map((a) => a.querySelector("title").textContent)`)
	require.Contains(t, names, "100 done, mail")
	require.Contains(t, names, "1,098 ready, mail")
	require.Contains(t, names, "blocked …"+last.String()[28:]+", report, this task")
	require.Empty(t, eval[[]string](w, faultsIn))
	require.Zero(t, w.count("[style], style"))
	require.True(t, eval[bool](w, `(() => { // levels go from the left to the right, and nodes do not cover each other
		const boxes = [...document.querySelectorAll("#graph a.node")].map((a) => a.querySelector("rect:last-of-type").getBoundingClientRect());
		return boxes.every((a, i) => boxes.every((b, j) => i === j || a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top));
	})()`))

	// The keyboard goes from node to node, and chooses one.
	focused := `document.activeElement.querySelector("title")?.textContent`
	w.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#graph a.self").focus()`))
	w.keys(kb.ArrowRight)
	w.wait(focused + `?.endsWith(", archive")`)
	w.keys(kb.ArrowLeft)
	w.wait(focused + `?.endsWith("this task")`)
	w.keys(kb.ArrowLeft)
	w.wait(focused + `?.endsWith(", mail")`)
	w.keys("\r")
	w.wait(`document.querySelector("#picked").textContent.includes("mail")`)
	require.Equal(t, 1, w.count("#graph a.node.on"))

	// Zoom.
	width := func() int { return eval[int](w, `document.querySelector("#graph svg").clientWidth`) }
	before := width()
	w.press(`#graph button[aria-label="Larger"]`)
	require.Greater(t, width(), before)
	require.True(t, eval[bool](w, "document.documentElement.scrollWidth <= innerWidth"), "it scrolls in its box")
	w.press(`#graph .flow-tools button:nth-child(2)`)
	require.Equal(t, before, width())

	// A dead letter is redriven from its node, after a question that says what that changes.
	w.press(`#graph a.node.dead`)
	require.Contains(t, w.text("#picked"), "Redrive: the 2 blocked tasks that wait for it go on when it is completed.")
	w.submit("#picked [data-action=redrive]", "The dead letter was redriven.")
	require.Equal(t, []string{"Redrive this task? the 2 blocked tasks that wait for it go on when it is completed."}, w.asked(true))
	require.Equal(t, codeq.Ready, s.task(dead).State)
	w.wait(`document.querySelectorAll("#graph a.node").length === 6`)
	w.press(`#graph a.self`)
	w.submit("#picked [data-action=cancel]", "The task was canceled.")
	require.Equal(t, []string{"Cancel this task for good? OK cancels it; the blocked task that waits for it is canceled as well."}, w.asked(true))
	require.Equal(t, codeq.Canceled, s.task(last).State)

	// The graph follows the queue.
	w.mark()
	l := s.claim("mail")
	require.NoError(t, s.q.DeadLetter(context.Background(), l.Receipt, errors.New("again")))
	w.wait(`document.querySelector("#graph a.node.dead")`)
	w.same()

	s.access.Store(uint32(codeqweb.Read))
	w.open("flow?id=" + last.String())
	require.Zero(t, w.count("form[method=post]"))
}

// TestFlowWithoutScript: the table is there without a script.
func TestFlowWithoutScript(t *testing.T) {
	t.Parallel()
	s, _, last := flowed(t)
	w := newTab(t, s)
	scripts := func(off bool) {
		_, err := chromedp.Call(w.ctx, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: off})
		require.NoError(t, err)
	}
	scripts(true)
	w.open("flow?id=" + last.String())
	scripts(false)
	require.True(t, eval[bool](w, `document.querySelector("#levels").open`))
	require.False(t, eval[bool](w, `document.querySelector("#graph").checkVisibility()`))
	require.Equal(t, 7, w.count("#nodes tbody tr"))
	require.Contains(t, w.text("#nodes"), "1,098 ready")
}
