// Package localsocket connects programs of the same user to the process that has a queue open: by a
// unix socket in the queue's directory, with the requests and answers of cluster nodes
// (internal/peer).
//
// # The place of the socket
//
// The socket is DIR/local/socket. DIR/local is a directory of mode 0700, which both sides check: it
// is no link, has the mode, and belongs to the user of the process that serves. If the path is too
// long for a socket, the socket is in a new directory of the same kind in that of temporary files,
// and the file DIR/local/address has its path. The next process removes all files of a killed one
// there: it has the lock of DIR, so no other process serves the queue.
//
// # Access
//
// Where the system names the user at the other end of a socket (Linux, macOS, FreeBSD), the server
// accepts its own user and root, and the client accepts only the owner of the directory. Elsewhere
// the mode of the directory decides. Each side names its queue and its format, and both must be the
// same: calls have no other versions.
package localsocket
