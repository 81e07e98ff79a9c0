package codeqweb

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// Access is the set of rights of a request.
type Access uint8

const (
	// Read shows everything that needs neither Payloads nor Admin. Every other right needs it.
	Read Access = 1 << iota
	// Payloads shows the payloads and results of tasks, their headers, metadata and logs, and the
	// notes of their progress; subject to [Options.Redact].
	Payloads
	// Act changes tasks: cancel, redrive, purge, forget, move, run now, change priority, clone,
	// produce; also in bulk, and by triggering a schedule. It releases idempotency keys.
	Act
	// Admin changes settings of queues, pauses, schedules, quiet workers and leaders of shards. It
	// shows the audit log.
	Admin

	// None allows nothing.
	None Access = 0
	// All is everything.
	All = Read | Payloads | Act | Admin
)

// accessNames has the names of the bits, in their order.
var accessNames = [...]string{"read", "payloads", "act", "admin"}

// Has reports whether all bits of b are in a.
func (a Access) Has(b Access) bool { return a&b == b }

// names returns the names of the bits that are set.
func (a Access) names() []string {
	names := []string{}
	for i, name := range accessNames {
		if a&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// String returns the names of the bits, such as "read+act"; "none" if there are none.
func (a Access) String() string {
	if a&All == 0 {
		return "none"
	}
	return strings.Join(a.names(), "+")
}

// hosts lists the accepted Host headers besides loopback.
type hosts []string

// allow reports whether a Host header names a loopback address, or a host of the list.
func (h hosts) allow(host string) bool {
	name := strings.ToLower(host)
	if bare, _, err := net.SplitHostPort(name); err == nil {
		name = bare
	}
	name = strings.TrimSuffix(strings.Trim(name, "[]"), ".")
	if name == "localhost" {
		return true
	}
	if addr, err := netip.ParseAddr(name); err == nil && addr.Unmap().IsLoopback() {
		return true
	}
	for _, listed := range h {
		listed = strings.ToLower(listed)
		if listed != "" && (listed == name || strings.Trim(listed, "[]") == name || listed == strings.ToLower(host)) {
			return true
		}
	}
	return false
}

// contentPolicy allows only the dashboard's own files: no inline script or style, no framing, no
// form to another site.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// setSecurityHeaders sets the headers of every answer.
func setSecurityHeaders(h http.Header) {
	h.Set("Content-Security-Policy", contentPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}
