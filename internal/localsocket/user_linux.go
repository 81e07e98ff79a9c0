package localsocket

import "golang.org/x/sys/unix"

// userOf returns the user of the process at the other end of a socket.
func userOf(fd uintptr) (user int, err error) {
	c, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, err
	}
	return int(c.Uid), nil
}
