package browsertest

import (
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"codeq"
)

// TestTree: a payload is searched, copied as it is, and a value tells its path.
func TestTree(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	const payload = `{"order": 81724.0, "lines":[{"sku":"A-1","a key":{"deep":["x"]}},  {"sku":"B-7"}]}`
	id := s.produce(codeq.Task{Queue: "a", Payload: []byte(payload)})
	w := newTab(t, s)
	w.open("task?id=" + id.String())
	w.do(chromedp.Evaluate[chromedp.Void](`navigator.clipboard.writeText = async (text) => { window.copied = text; }`))
	w.press("#payload [data-copy]")
	w.waitText("#payload output", "copied")
	require.Equal(t, payload, eval[string](w, "window.copied"))
	w.do(chromedp.Evaluate[chromedp.Void](`navigator.clipboard.writeText = async () => { throw new Error("no"); }; document.execCommand = () => { window.copied = document.activeElement.value; return true; }`))
	w.press("#payload [data-copy]")
	w.wait(`window.copied === ` + quoted(payload))

	seen := `[...document.querySelectorAll("#payload .value")].filter((v) => v.checkVisibility()).map((v) => v.textContent).join(" ")`
	require.Equal(t, `81724.0`, eval[string](w, seen), "two levels are open")
	search := func(text string) {
		w.fill("#payload input", text)
		w.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#payload input").dispatchEvent(new Event("input"))`))
	}
	search("SKU")
	w.waitText("#payload output", "2 found")
	require.Equal(t, `"A-1" "B-7"`, eval[string](w, seen))
	search("b-7")
	require.Equal(t, `"B-7"`, eval[string](w, seen))
	search("a key")
	require.Equal(t, 1, w.count("#payload .hit"))
	w.press("#payload .hit > summary")
	w.press("#payload .hit > details > summary")
	w.press("#payload .hit .value")
	w.waitText("#payload output", `$.lines[0]["a key"].deep[0]`)
	search("")
	require.Equal(t, `81724.0`, eval[string](w, seen), "as before")
	require.Empty(t, eval[[]string](w, faultsIn))
}
