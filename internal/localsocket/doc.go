// Package localsocket lets programs of the same user call the process that has a queue open: by a
// unix socket in the queue's directory, over which requests and answers go as they do between the
// nodes of a cluster (internal/peer).
//
// # The place of the socket
//
// The socket is DIR/local/socket. DIR/local is a directory of mode 0700, which both sides check: it
// is no link, has the mode, and belongs to the user of the process that serves. If the path is too
// long for a socket, the socket is in a new directory of the same kind in that of temporary files,
// and the file DIR/local/address has its path. Whatever a process that was killed has left there is
// removed by the next one: it has the lock of DIR, so nobody else serves the queue.
//
// # Who is let in
//
// Where the system tells who is at the other end of a socket (Linux, macOS, FreeBSD), the side that
// serves lets its own user and root in, and the other side talks to nobody but the owner of the
// directory. Elsewhere the mode of the directory decides. Each side says which queue it means and
// which format it knows, and both must be the same: calls have no other versions.
package localsocket
