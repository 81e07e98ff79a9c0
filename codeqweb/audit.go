package codeqweb

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Entry is a change, or an attempt at one.
type Entry struct {
	Time   time.Time
	User   string `json:",omitzero"` // from [Options.User] or [Options.Audit]; "": from neither
	Remote string // the address of the client
	Action string // such as "task/cancel"
	// Target is the ID of the task, or the name of the queue, schedule, worker or node. Detail has
	// the other parameters.
	Target string `json:",omitzero"`
	Detail string `json:",omitzero"`
	Error  string `json:",omitzero"` // why it failed, or was refused
	// Refused: the request lacked the access. Such entries are shown to Options.Audit only, and
	// have the parameters of the URL: no body was read.
	Refused bool `json:",omitzero"`
}

// auditEntries bounds the entries in memory.
const auditEntries = 1000

// auditText bounds each text of an entry, in bytes.
const auditText = 300

// auditLog keeps the latest entries in memory.
type auditLog struct {
	hook func(*http.Request, *Entry)

	mu      sync.Mutex
	entries []Entry // the oldest first
}

// add calls the hook, which may set the user, and keeps the entry. A panic of the hook is added to
// Entry.Error.
func (l *auditLog) add(r *http.Request, e Entry) {
	e.Time, e.Remote = time.Now().UTC(), r.RemoteAddr
	e.Action = strings.Clone(e.Action) // not the whole URL
	e.Target, e.Detail, e.Error = clip(e.Target, auditText), clip(e.Detail, auditText), clip(e.Error, auditText)
	if l.hook != nil {
		if err := contained("Options.Audit", func() { l.hook(r, &e) }); err != nil {
			e.Error = strings.TrimPrefix(e.Error+"; "+err.Error(), "; ")
		}
	}
	if e.Refused {
		return
	}
	e.User = clip(e.User, auditText)
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.entries) == auditEntries {
		l.entries = slices.Delete(l.entries, 0, 1)
	}
	l.entries = append(l.entries, e)
}

// newest returns the entries, the newest first.
func (l *auditLog) newest() []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	entries := slices.Clone(l.entries)
	slices.Reverse(entries)
	return entries
}

// auditPage shows the audit log.
func (d *Dashboard) auditPage(w http.ResponseWriter, r *request) error {
	return d.show(w, r, page{Title: "Audit", Screen: "audit", Refresh: 5, Body: d.audit.newest()})
}
