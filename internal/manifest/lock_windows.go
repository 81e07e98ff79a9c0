package manifest

import "syscall"

// heldErrnos are those of CreateFile, which opens the file for nobody else: ERROR_SHARING_VIOLATION
// and ERROR_LOCK_VIOLATION.
var heldErrnos = []syscall.Errno{32, 33}
