/* Keeps pyfly.h plain C: it is included alone, twice. */
#include "pyfly.h"

int main(void) {
    pyfly_error error;
    error.message[0] = '\0';
    return (int) error.message[0];
}
