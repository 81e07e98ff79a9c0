package browsertest

import (
	"fmt"
	"os"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"codeq/codeqweb"
)

// axe returns the source of axe-core, which the environment variable CODEQ_AXE names.
func axe(t *testing.T) string {
	path := os.Getenv("CODEQ_AXE")
	if path == "" {
		t.Skip("no CODEQ_AXE: the path of axe.min.js of the npm package axe-core")
	}
	source, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(source)
}

// violationsIn returns what axe-core finds in the page.
const violationsIn = `axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations.flatMap((rule) =>
	rule.nodes.map((node) => rule.id + ": " + rule.help + ": " + node.html.slice(0, 200) + " " + node.failureSummary.split("\n").slice(1, 3).join(" "))))`

// TestAxe: axe-core has nothing to say about any screen, at a desk and on a phone, light and dark.
func TestAxe(t *testing.T) {
	t.Parallel()
	source := axe(t)
	s, ids := loaded(t)
	s.access.Store(uint32(codeqweb.All))
	w := newTab(t, s)
	for _, phone := range []bool{false, true} {
		if w.do(size(1280, 800, false)); phone {
			w.do(size(360, 740, true))
		}
		for _, colors := range []string{"light", "dark"} {
			w.do(scheme(colors))
			for _, path := range append(screens(ids), "task?id=nonsense") {
				w.allow("Failed to load resource")
				w.open(path)
				run(w, chromedp.Evaluate[any](source+"; 1"))
				for _, found := range eval[[]string](w, violationsIn) {
					t.Error(fmt.Sprintf("%s, phone %t, %s: %s", colors, phone, path, found))
				}
			}
		}
	}
}
