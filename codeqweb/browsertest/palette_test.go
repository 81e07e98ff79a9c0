package browsertest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestPalette: the keyboard goes to each screen, presses each button of a page, and searches.
func TestPalette(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	s.fill(3, codeq.Task{Queue: "mail", Tenant: "acme"})
	w := newTab(t, s)
	open := func() {
		t.Helper()
		w.keys("/")
		w.wait(`document.querySelector("#palette").open && document.activeElement.id === "palette-text"`)
	}
	leads := func(text, heading string) {
		t.Helper()
		open()
		w.mark()
		w.keys(text)
		w.keys("\r")
		w.loaded()
		require.Equal(t, heading, w.text("h1"))
	}
	leads("sched", "Schedules")
	leads("go over", "Overview")
	leads("acme", "Search for acme")
	require.Equal(t, 3, w.count("#tasks tbody tr"))
	w.open("queue?name=mail")
	leads("pause", "Queue mail")
	require.True(t, s.settings("mail").Paused)
	open()
	require.Equal(t, 1, w.count("#palette-list [aria-selected=true]"))
	w.keys("no such thing at all")
	w.waitText("#palette-list", "Search for no such thing at all")
	w.keys("\x1b")
	w.wait(`!document.querySelector("#palette").open`)
}
